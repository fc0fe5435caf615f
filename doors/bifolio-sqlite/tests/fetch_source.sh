#!/bin/sh
# fetch_source.sh DIRECTORY: puts the sources of the installed SQLite into DIRECTORY/source, from
# Debian's source package. The lists of source packages stay in the directory: the system's are not
# changed.
set -eu
cd "$1"
[ ! -d source ] || exit 0
mkdir -p lists/partial
cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
  sed -n 's/^deb /deb-src /p' >deb-src.list
cat /etc/apt/sources.list.d/*.sources 2>/dev/null |
  sed 's/^Types:.*/Types: deb-src/' >deb-src.sources
[ -s deb-src.list ] && list=deb-src.list || list=deb-src.sources
apt() {
  apt-get -q -o Dir::Etc::sourcelist="$PWD/$list" -o Dir::Etc::sourceparts=- \
    -o Dir::State::Lists="$PWD/lists" -o APT::Sandbox::User=root "$@"
}
apt update
apt source --download-only sqlite3
rm -rf unpacked
dpkg-source -x sqlite3_*.dsc unpacked
test -s unpacked/test/speedtest1.c
mv unpacked source
