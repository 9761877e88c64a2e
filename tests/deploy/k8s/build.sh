#!/usr/bin/env bash
# build.sh DEST: kube-apiserver, controller-manager, scheduler, kubelet and kube-proxy
# 1.20.2 from Debian 12's own source package "kubernetes" (Apache-2.0), with Debian's Go (golang-1.19-go).
# 35 MB to fetch, 4 to 6 minutes on two cores, 2.5 GB of scratch.
set -euo pipefail
dest=$(mkdir -p "$1" && cd "$1" && pwd)
src=$(mktemp -d)
trap 'rm -rf "$src"' EXIT
# the machine's list names binary packages only: use a private list with deb-src
mkdir -p "$src/lists/partial" "$src/cache"
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(awk '/^URIs:/{print $2; exit}' /etc/apt/sources.list.d/debian.sources) bookworm main" >"$src/src.list"
o=(-o "Dir::Etc::sourcelist=$src/src.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$src/lists" -o "Dir::Cache=$src/cache")
apt-get "${o[@]}" -q update
cd "$src" && apt-get "${o[@]}" -q source --download-only kubernetes
mkdir -p "$src/go/src/k8s.io" && tar xzf kubernetes_*.orig.tar.gz
mv kubernetes-1.20.2 "$src/go/src/k8s.io/kubernetes"
export GOPATH=$src/go GOCACHE=$src/gocache GO111MODULE=off CGO_ENABLED=0 GOPROXY=off PATH=/usr/lib/go-1.19/bin:$PATH
cd "$GOPATH/src/k8s.io/kubernetes"
# the one generated file that the tarball lacks
go build -o "$src/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
dirs=$(grep -rl '+k8s:openapi-gen=' --include='*.go' pkg cmd plugin staging/src/k8s.io/{api,apimachinery,apiserver,apiextensions-apiserver,kube-aggregator,kube-controller-manager,kube-proxy,kube-scheduler,kubelet,metrics,client-go,component-base,cloud-provider,controller-manager} |
	grep -v -E '_test.go|testdata|zz_generated' | xargs -n1 dirname | sort -u |
	sed 's#^staging/src/#k8s.io/kubernetes/vendor/#; t; s#^#k8s.io/kubernetes/#' | paste -sd,)
"$src/openapi-gen" --go-header-file hack/boilerplate/boilerplate.generatego.txt -O zz_generated.openapi \
	-r /dev/null -p k8s.io/kubernetes/pkg/generated/openapi -i "$dirs" --output-base "$GOPATH/src"
v=k8s.io/kubernetes/vendor/k8s.io/component-base/version
for c in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy; do
	go build -trimpath -ldflags "-s -w -X $v.gitVersion=v1.20.2 -X $v.gitMajor=1 -X $v.gitMinor=20" -o "$dest/$c" "k8s.io/kubernetes/cmd/$c"
	echo "built $c"
done
chmod -R u+w "$src"
