#!/usr/bin/env bash
# Keys as Secrets, the allow list as a ConfigMap. Files lie in ./keys and ./allowed; what is there is not made anew.
#
#   keys.sh NODE...              everything in one cluster: the coordinator's key, the nodes', all of them allowed
#   keys.sh --coordinator        the coordinator's key, and the allow list as ./allowed has it
#   keys.sh --allow              the allow list again, after farloop keys authorize or revoke: known within a minute
#   keys.sh --node NAME SERVER   one node's key beside the coordinator's public key, the file SERVER
#
# To rotate a node's key: remove keys/NAME.*, run --node again, carry NAME.pub to the coordinator, authorize it there in
# place of the old one (revoke, authorize, --allow), delete the node's pod.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
farloop=${FARLOOP:-farloop} kubectl=${KUBECTL:-kubectl}

put() { # KIND... : creates or replaces
	$kubectl --namespace farloop create "$@" --dry-run=client --output yaml | $kubectl apply --filename -
}
key() { [ -e "keys/$1.key" ] || $farloop keys new keys --name "$1"; }
coordinator() {
	mkdir -p allowed
	key coordinator
	put secret generic farloop-coordinator-key --from-file=keys/coordinator.key
}
allow() {
	[ -d allowed ] || { echo "keys.sh: there is no ./allowed here, so no node would be admitted: go to its folder" >&2; exit 2; }
	put configmap farloop-allowed --from-file=allowed
}

[ $# -gt 0 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
$kubectl apply --kustomize "$here/base/namespace"
case $1 in
--coordinator) coordinator; allow ;;
--allow) allow ;;
--node)
	[ $# -eq 3 ] || { echo "keys.sh --node NAME SERVER.pub" >&2; exit 2; }
	key "$2"
	put secret generic farloop-node-keys --from-file="keys/$2.key" --from-file=coordinator.pub="$3"
	;;
--*) echo "keys.sh: there is no $1; --coordinator, --allow or --node" >&2; exit 2 ;;
*)
	coordinator
	files=()
	for name in "$@"; do
		key "$name"
		$farloop keys authorize "keys/$name.pub" --allow allowed
		files+=(--from-file="keys/$name.key")
	done
	put secret generic farloop-node-keys "${files[@]}" --from-file=keys/coordinator.pub
	allow
	;;
esac
