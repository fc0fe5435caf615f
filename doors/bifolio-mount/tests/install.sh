#!/bin/sh
# install.sh [PROGRAM...]: installs what the tests of the mount use and this machine lacks; without
# arguments all of it. Needs apt-get and root only if something is missing.
set -eu
[ $# -gt 0 ] || set -- fusermount3 setpriv git sqlite3 fio cc acl.h \
  getfattr setfacl getcap rsync tar /usr/bin/python3 mkfs.ext4 mkfs.btrfs
missing=
for program in "$@"; do
  case $program in
    acl.h) [ -e /usr/include/sys/acl.h ] || missing="$missing libacl1-dev" ;; # pjdfstest links to it
    *)
      command -v "$program" >/dev/null && continue
      case $program in
        fusermount3) package=fuse3 ;;
        setpriv) package=util-linux ;;
        cc) package=gcc ;;
        getfattr) package=attr ;;
        setfacl) package=acl ;;
        getcap) package=libcap2-bin ;;
        /usr/bin/python3) package=python3 ;; # one that other users may run
        mkfs.ext4) package=e2fsprogs ;;
        mkfs.btrfs) package=btrfs-progs ;;
        *) package=$program ;;
      esac
      missing="$missing $package"
      ;;
  esac
done
[ -n "$missing" ] || exit 0
echo "missing:$missing; trying: apt-get install$missing" >&2
command -v apt-get >/dev/null || {
  echo "there is no apt-get: install by hand what corresponds to$missing" >&2
  exit 1
}
# shellcheck disable=SC2086 # a list of words
{
  apt-get -q update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qy -o DPkg::Lock::Timeout=120 install $missing
} >&2 || {
  echo "apt-get could not install$missing: install it by hand, then repeat" >&2
  exit 1
}
