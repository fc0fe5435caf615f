//! The emulated system: Debian's packages for the other processor, extracted but not configured,
//! on a disk with the programs; Debian's kernel, and an initial RAM disk that mounts the disk.
//!
//! Called by [`super`]. It needs root, for the owners of the files. Nothing is started by an init
//! system: the first process is a shell that runs `check.sh` and turns the machine off.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{END, Program};
use crate::process;

/// Debian's release in the system: one whose kernel has every feature of writable maps.
const RELEASE: &str = "trixie";
/// Modules of the kernel that mount the disk.
const MODULES: [&str; 3] = ["virtio_blk", "crc32c_generic", "ext4"];
/// Features of the library that the system has: a test that is skipped for one of them fails.
const REQUIRED: &str =
    "io-uring,root,user-faults,kernel-faults,write-protect-async,fault-poison,cpus,tmpfs";
/// Size of the disk, which is sparse.
const DISK: &str = "8G";

/// Files from which the emulator starts.
pub struct System {
    pub kernel: PathBuf,
    pub initial: PathBuf,
    pub disk: PathBuf,
}

/// Makes the files of a system below `folder`; what was downloaded stays there for the next time.
pub fn make(folder: &Path, pages: u32, programs: &[Program], lines: &[String]) -> Result<System> {
    let root = folder.join("root");
    let kernel_package = if pages == 16 { "linux-image-arm64-16k" } else { "linux-image-arm64" };
    if !root.join("etc/extracted").exists() {
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(folder)?;
        process::run(
            Command::new("mmdebstrap")
                .args(["--mode=root", "--arch=arm64", "--variant=extract"])
                .arg(format!("--include=busybox-static,kmod,libgcc-s1,{kernel_package}"))
                .args([RELEASE.as_ref(), root.as_os_str()]),
        )?;
        for name in ["bin", "lib", "sbin"] {
            let _ = symlink(format!("usr/{name}"), root.join(name));
        }
        // The scripts of the packages have not run, which would choose a shell.
        let _ = symlink("busybox", root.join("usr/bin/sh"));
        for name in ["proc", "sys", "dev", "tmp", "root", "run"] {
            fs::create_dir_all(root.join(name))?;
        }
        fs::write(root.join("etc/extracted"), RELEASE)?;
    }
    let kernel = only_file(&root.join("boot"), "vmlinuz-")?;
    let release = only_file(&root.join("usr/lib/modules"), "")?;
    let version = release.file_name().and_then(|it| it.to_str()).context("kernel version")?;
    process::run(Command::new("depmod").arg("-b").arg(root.join("usr")).args(["-a", version]))?;
    fill(&root.join("check"), programs, lines)?;
    // `CARGO_TARGET_TMPDIR`, whose path is in the test programs.
    let files = super::folder().join(super::TARGET).join("tmp");
    fs::create_dir_all(root.join(files.strip_prefix("/").unwrap_or(&files)))?;
    fs::write(root.join("check/start.sh"), START.replace('@', REQUIRED))?;
    let (initial, disk) = (folder.join("initial"), folder.join("disk"));
    fs::write(&initial, initial_disk(&root, &release)?)?;
    let _ = fs::remove_file(&disk);
    let mut make = Command::new("mkfs.ext4");
    // Not every machine has `/sbin` in its path.
    make.env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default()));
    process::run(make.args(["-q", "-F", "-d"]).arg(&root).arg(&disk).arg(DISK))?;
    Ok(System { kernel, initial, disk })
}

/// Fills a folder with the programs, and with `check.sh`, which runs `lines`.
pub fn fill(folder: &Path, programs: &[Program], lines: &[String]) -> Result<()> {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder)?;
    for program in programs {
        let to = folder.join(&program.name);
        fs::copy(&program.path, &to).with_context(|| format!("cannot copy {}", to.display()))?;
    }
    let steps: String = lines.iter().map(|line| format!("step '{line}'\n")).collect();
    fs::write(folder.join("check.sh"), format!("{CHECK}{steps}{CHECK_END}{END}'\n"))?;
    Ok(())
}

/// Runs the programs, all of them, and tells how long each takes. `RUN` is the emulator, if any.
const CHECK: &str = r#"
head -c 33554432 /dev/urandom > checked
failed=
step() {
  echo "check-arch: $1"
  start=$(date +%s)
  if PATH=.:$PATH sh -c "${RUN:-} $1"; then state=passed; else state=FAILED; failed=1; fi
  echo "check-arch: $state: $1 ($(($(date +%s) - start)) s)"
}
"#;
const CHECK_END: &str = "[ -z \"$failed\" ] && echo '";

/// The first process of the system.
const START: &str = r#"
export PATH=/usr/sbin:/usr/bin HOME=/root TMPDIR=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
mount -t cgroup2 cgroup /sys/fs/cgroup
busybox ip link set lo up
uname -srm
cd /check
BIFOLIO_TEST_REQUIRE=@ sh check.sh
sync
echo o > /proc/sysrq-trigger
sleep 60
"#;

/// Returns the initial RAM disk, an archive of cpio: a shell, modules, and what mounts the disk.
fn initial_disk(root: &Path, release: &Path) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for name in ["bin", "dev", "disk"] {
        archive.folder(name);
    }
    archive.file("bin/busybox", &fs::read(root.join("usr/bin/busybox"))?)?;
    let mut init = "#!/bin/busybox sh\n/bin/busybox mount -t devtmpfs dev /dev\n".to_owned();
    for (number, path) in modules(release)?.iter().enumerate() {
        let output = Command::new("xz").args(["-dc"]).arg(release.join(path)).output()?;
        ensure!(output.status.success(), "xz -dc {path}");
        archive.file(&format!("{number}.ko"), &output.stdout)?;
        init += &format!("/bin/busybox insmod /{number}.ko\n");
    }
    init += "/bin/busybox mount -t ext4 /dev/vda /disk\n\
             /bin/busybox mount -o move /dev /disk/dev\n\
             exec /bin/busybox switch_root /disk /bin/sh /check/start.sh\n";
    archive.file("init", init.as_bytes())?;
    Ok(archive.end())
}

/// Returns the paths of `MODULES` and of those that they need, each after what it needs.
fn modules(release: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(release.join("modules.dep")).context("modules.dep")?;
    let mut paths: Vec<String> = Vec::new();
    for name in MODULES {
        let line = text.lines().filter_map(|line| line.split_once(':'));
        let found = line.into_iter().find(|(path, _)| path.ends_with(&format!("/{name}.ko.xz")));
        let (path, needed) = found.with_context(|| format!("no module {name}"))?;
        let needed: Vec<_> = needed.split_whitespace().rev().chain([path]).collect();
        for path in needed {
            if !paths.iter().any(|known| known == path) {
                paths.push(path.to_owned());
            }
        }
    }
    Ok(paths)
}

/// Returns the only entry of a folder whose name starts with `prefix`.
fn only_file(folder: &Path, prefix: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut entries = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let is_wanted = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(prefix))
    };
    entries.find(is_wanted).with_context(|| format!("{} has no {prefix}", folder.display()))
}

/// An archive of cpio, in the format `newc`.
#[derive(Default)]
struct Archive(Vec<u8>);

impl Archive {
    fn folder(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    fn file(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        ensure!(u32::try_from(bytes.len()).is_ok(), "{name} is too large");
        self.entry(name, 0o100_755, bytes);
        Ok(())
    }

    fn entry(&mut self, name: &str, mode: u32, bytes: &[u8]) {
        let inode = self.0.len() as u32 + 1;
        let fields = [inode, mode, 0, 0, 1, 0, bytes.len() as u32, 0, 0, 0, 0];
        let header: String = fields.iter().map(|field| format!("{field:08x}")).collect();
        let _ = write!(self.0, "070701{header}{:08x}{:08x}{name}\0", name.len() + 1, 0);
        self.align();
        self.0.extend_from_slice(bytes);
        self.align();
    }

    fn align(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn end(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_aligned_entries_and_a_trailer() {
        let mut archive = Archive::default();
        archive.folder("bin");
        archive.file("init", b"exit").unwrap();
        let bytes = archive.end();
        assert_eq!(bytes.len() % 4, 0);
        assert!(bytes.starts_with(b"070701"));
        let text = String::from_utf8(bytes).unwrap();
        assert_eq!(text.matches("070701").count(), 3);
        assert!(text.contains("init\0\0\0exit") || text.contains("init\0\0exit"), "{text}");
        assert!(text.contains("TRAILER!!!\0"));
    }
}
