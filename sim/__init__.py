"""A discrete-event world that runs the daemons' own machines and sessions on virtual time."""
