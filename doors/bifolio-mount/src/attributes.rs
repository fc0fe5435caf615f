//! Attributes of inodes: those of the source directory, with the size and times of unwritten data.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, TimeOrNow};
use rustix::fs::{
    AtFlags, CWD, FileType as Kind, Gid, Mode, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT,
    Uid, chmodat, chownat, removexattr, utimensat,
};

use crate::error::Result;
use crate::inode::Inode;
use crate::xattr::CAPABILITY;

const SET_USER_ID: u32 = libc::S_ISUID;
const SET_GROUP_ID: u32 = libc::S_ISGID;
const OWNER_USES: u32 = libc::S_IRUSR | libc::S_IWUSR;
const GROUP_EXECUTES: u32 = libc::S_IXGRP;

/// Changes that a program asks for, but that of the size.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct Changes {
    pub mode: Option<u32>,
    pub owner: Option<u32>,
    pub group: Option<u32>,
    pub accessed: Option<TimeOrNow>,
    pub modified: Option<TimeOrNow>,
}

impl Inode {
    /// Returns the attributes that programs see.
    pub fn attributes(&self) -> Result<FileAttr> {
        // The data are locked before the status is read: closing a file changes both.
        let mut data = self.data();
        let stat = self.stat()?;
        let changed = system_time(stat.st_ctime, stat.st_ctime_nsec);
        let changed = match (data.modified, data.changed) {
            // Writing pages changes the status without a change that the program has made.
            (Some(_), Some(ours)) => ours,
            (_, ours) => ours.map_or(changed, |ours| ours.max(changed)),
        };
        data.changed = Some(changed);
        let size = data.len_bytes().unwrap_or(stat.st_size as u64);
        let mut blocks = stat.st_blocks as u64;
        if data.unwritten_bytes > 0 {
            // Programs take a file without blocks for one hole. It gets them when it is written.
            let most = size.next_multiple_of(4096) / 512;
            blocks = blocks.max(most.min(blocks.saturating_add(data.unwritten_bytes / 512)));
        }
        Ok(FileAttr {
            ino: self.number,
            size,
            blocks,
            atime: system_time(stat.st_atime, stat.st_atime_nsec),
            mtime: data.modified.unwrap_or(system_time(stat.st_mtime, stat.st_mtime_nsec)),
            ctime: changed,
            crtime: UNIX_EPOCH,
            kind: kind(self.kind),
            perm: (stat.st_mode & 0o7777) as u16,
            nlink: stat.st_nlink as u32,
            uid: stat.st_uid,
            gid: stat.st_gid,
            rdev: stat.st_rdev as u32,
            blksize: stat.st_blksize as u32,
            flags: 0,
        })
    }

    /// Makes changes of owner, mode and times. The owner comes first, because changing it clears
    /// bits of the mode.
    pub fn change_attributes(&self, changes: &Changes) -> Result<()> {
        if changes.owner.is_some() || changes.group.is_some() {
            let (owner, group) =
                (changes.owner.map(Uid::from_raw), changes.group.map(Gid::from_raw));
            chownat(self.handle()?, c"", owner, group, AtFlags::EMPTY_PATH)?;
        }
        if let Some(mode) = changes.mode {
            self.set_mode(mode)?;
        }
        if changes.accessed.is_some() || changes.modified.is_some() {
            let (last_access, last_modification) = (ask(changes.accessed), ask(changes.modified));
            let mut data = self.data();
            let times = Timestamps { last_access, last_modification };
            self.with_path(|path| utimensat(CWD, path, &times, AtFlags::empty()))?;
            if changes.modified.is_some() && data.modified.is_some() {
                // Pages that are written later must not change it.
                let stat = self.stat()?;
                data.modified = Some(system_time(stat.st_mtime, stat.st_mtime_nsec));
            }
        }
        self.data().touch();
        Ok(())
    }

    /// Runs an open of the file for the cache, which reads also what a program only writes or runs.
    /// The kernel has checked the rights of that program. So a user without privileges, whose file
    /// this is, gets them for the moment of the open. The data of the inode are locked.
    pub fn with_rights<T>(&self, status: &Stat, open: impl FnOnce() -> T) -> Result<T> {
        let Stat { st_mode, st_uid, .. } = *status;
        if st_mode & OWNER_USES == OWNER_USES {
            return Ok(open());
        }
        let user = rustix::process::geteuid();
        if user.is_root() || st_uid != user.as_raw() {
            return Ok(open());
        }
        let set = |mode: u32| {
            let mode = Mode::from_raw_mode(mode & 0o7777);
            self.with_path(|path| chmodat(CWD, path, mode, AtFlags::empty()))
        };
        set(st_mode | OWNER_USES)?;
        let opened = open();
        set(st_mode)?;
        Ok(opened)
    }

    fn set_mode(&self, mode: u32) -> Result<()> {
        if mode & (SET_USER_ID | SET_GROUP_ID) != 0 && self.kind == Kind::RegularFile {
            // If this program is not root, the write-out of earlier writes would clear the bits.
            self.write_pages()?;
        }
        let mut data = self.data();
        let mode = Mode::from_raw_mode(mode & 0o7777);
        self.with_path(|path| chmodat(CWD, path, mode, AtFlags::empty()))?;
        data.has_no_set_id = false;
        Ok(())
    }

    /// Clears what a change of the contents clears: a program that runs with rights of its own must
    /// not be changed by others. Those are its capabilities, and, unless root changes it, the
    /// set-id bits. Returns `true` if it cleared any.
    pub fn clear_privileges(&self, is_by_root: bool) -> Result<bool> {
        let mut data = self.data();
        let may_have_capability = !std::mem::replace(&mut data.has_no_capability, true);
        let may_have_set_id = !is_by_root && !std::mem::replace(&mut data.has_no_set_id, true);
        drop(data);
        // If this is refused, the file system removes them when the change is written out.
        let remove = |path: &str| removexattr(path, CAPABILITY);
        let had_capability = may_have_capability && self.with_path(remove).is_ok();
        if !may_have_set_id {
            return Ok(had_capability);
        }
        let mode = self.stat()?.st_mode;
        let cleared = without_set_id(mode);
        if cleared != mode {
            self.set_mode(cleared)?;
        }
        Ok(had_capability || cleared != mode)
    }

    /// Gives a new inode, with its status, to the program that created it, unless it is its own
    /// already.
    pub fn give_to(&self, status: &Stat, owner: u32, group: Option<u32>) -> Result<()> {
        let Stat { st_uid, st_gid, st_mode, .. } = *status;
        let group = group.filter(|group| *group != st_gid);
        let owner = Some(owner).filter(|owner| *owner != st_uid);
        if owner.is_none() && group.is_none() {
            return Ok(());
        }
        let has_set_id = self.kind == Kind::RegularFile && without_set_id(st_mode) != st_mode;
        let mode = has_set_id.then_some(st_mode);
        self.change_attributes(&Changes { mode, owner, group, ..Changes::default() })
    }
}

fn without_set_id(mode: u32) -> u32 {
    let group = if mode & GROUP_EXECUTES != 0 { SET_GROUP_ID } else { 0 };
    mode & !(SET_USER_ID | group)
}

fn ask(time: Option<TimeOrNow>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(TimeOrNow::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(TimeOrNow::SpecificTime(time)) => timespec_of_request(time),
    }
}

/// Converts the time of a request. Of one before 1970, `fuser` has subtracted the nanoseconds from
/// the seconds instead of adding them.
fn timespec_of_request(time: SystemTime) -> Timespec {
    match time.duration_since(UNIX_EPOCH) {
        Ok(_) => timespec(time),
        Err(error) => {
            let before = error.duration();
            let tv_sec = -(before.as_secs() as i64);
            Timespec { tv_sec, tv_nsec: i64::from(before.subsec_nanos()) }
        }
    }
}

/// Converts a time; also one before 1970.
pub fn timespec(time: SystemTime) -> Timespec {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => {
            Timespec { tv_sec: since.as_secs() as i64, tv_nsec: i64::from(since.subsec_nanos()) }
        }
        Err(error) => {
            let before = error.duration();
            let nanoseconds = i64::from(before.subsec_nanos());
            let borrowed = i64::from(nanoseconds > 0);
            Timespec {
                tv_sec: -(before.as_secs() as i64) - borrowed,
                tv_nsec: borrowed * 1_000_000_000 - nanoseconds,
            }
        }
    }
}

fn system_time(seconds: i64, nanoseconds: u64) -> SystemTime {
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let second = if seconds < 0 { UNIX_EPOCH - whole } else { UNIX_EPOCH + whole };
    second + Duration::from_nanos(nanoseconds)
}

/// Converts a time.
pub fn system_time_of(time: Timespec) -> SystemTime {
    system_time(time.tv_sec, time.tv_nsec as u64)
}

/// Converts the kind of an inode.
pub fn kind(kind: Kind) -> FileType {
    match kind {
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
        Kind::CharacterDevice => FileType::CharDevice,
        Kind::BlockDevice => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_survive_the_conversion() {
        for (seconds, nanoseconds) in
            [(0, 0), (-1, 999_999_999), (-7, 0), (1, 1), (i64::MAX / 8, 5)]
        {
            let back = timespec(system_time(seconds, nanoseconds));
            assert_eq!((back.tv_sec, back.tv_nsec), (seconds, nanoseconds as i64));
        }
    }
}
