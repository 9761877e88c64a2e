"""What operators see: HTTP endpoint, status, status page, dashboards and alerts. Imports no other package."""
