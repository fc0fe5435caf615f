//! Whether the free space of a file system is all that bounds its writes.
//!
//! A quota refuses bytes for which there is free space, and no file system says how many it leaves.
//! So where quotas are enforced, the mount takes the blocks of each write at once (`room.rs`).
//! Where they may be enforced unseen, on a server or below another program, the write-out reports
//! them.

use std::fs;
use std::os::fd::AsFd;

use rustix::fs::{fstat, major, minor};

const EXT: u64 = 0xef53;
const XFS: u64 = 0x5846_5342;
const F2FS: u64 = 0xf2f5_2010;
const TMPFS: u64 = 0x0102_1994;
const OVERLAY: u64 = 0x794c_7630;
const BTRFS: u64 = 0x9123_683e;

/// Bounds of a file system beside its free space.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    pub has_quotas: bool,
    /// `true` if a write into blocks that were allocated for it finds room.
    pub keeps_allocated: bool,
}

/// Returns the limits of the file system of a file. `kind` is the number of its type.
pub fn limits_of(file: impl AsFd, kind: u64) -> Limits {
    let has_quotas = match kind {
        EXT | XFS | F2FS | TMPFS | OVERLAY => {
            let mounts = fs::read_to_string("/proc/self/mountinfo");
            let device = fstat(&file).map_or(0, |status| status.st_dev);
            let device = format!("{}:{}", major(device), minor(device));
            mounts.is_ok_and(|mounts| quotas_by_options(&mounts, &device))
        }
        BTRFS => has_quotas_of_btrfs(),
        _ => false,
    };
    Limits { has_quotas, keeps_allocated: matches!(kind, EXT | XFS | TMPFS | OVERLAY) }
}

/// Returns `true` if the options of a mount of the device, in a list as the kernel prints it, turn
/// quotas on.
fn quotas_by_options(mounts: &str, device: &str) -> bool {
    let is_quota = |option: &str| {
        matches!(option, "quota" | "usrquota" | "grpquota" | "prjquota")
            || ["usrjquota=", "grpjquota=", "prjjquota="].iter().any(|of| option.starts_with(of))
    };
    let mut of_device = mounts.lines().filter(|line| line.split(' ').nth(2) == Some(device));
    of_device.any(|line| line.split([' ', ',']).any(is_quota))
}

/// Asks all file systems of the kind: a file does not tell which of them has it.
fn has_quotas_of_btrfs() -> bool {
    let Ok(mut systems) = fs::read_dir("/sys/fs/btrfs") else { return false };
    systems.any(|system| system.is_ok_and(|system| system.path().join("qgroups").exists()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_tell_of_quotas() {
        let mounts = "29 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
                      30 1 254:1 / /home rw - ext4 /dev/vdb rw,usrquota,errors=continue\n\
                      31 1 254:2 / /srv rw - ext4 /dev/vdc rw,jqfmt=vfsv1,grpjquota=aquota.group\n\
                      32 1 254:3 / /quota rw - xfs /dev/vdd rw,noquota\n";
        for (device, expected) in
            [("254:0", false), ("254:1", true), ("254:2", true), ("254:3", false), ("254:4", false)]
        {
            assert_eq!(quotas_by_options(mounts, device), expected, "{device}");
        }
    }
}
