//! The source directory as a [`Volume`]: names, directories and extended attributes.
//!
//! Every name is resolved in a descriptor of its directory, so that renames elsewhere do not
//! matter; `handle.rs` says where that comes from. The kernel has checked all permissions
//! (`default_permissions`) before it asks; a mount by root acts as root here and gives new inodes
//! to the program that created them.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use bifolio::File;
use fuser::{FileAttr, FopenFlags, INodeNo, Notifier, OpenFlags, Request, WriteFlags};
use parking_lot::Mutex;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RawDir, RenameFlags, SeekFrom, Stat,
    StatVfs, fstat, fsync, linkat, mkdirat, mknodat, openat, readlinkat, renameat_with, seek,
    symlinkat, unlinkat,
};
use rustix::io::Errno;

use crate::attributes::Changes;
use crate::data::{Access, Files, Opened, Opening};
use crate::error::Result;
use crate::handle::{Handle, Pinned, open_name, path_of};
use crate::inode::{Inode, Table};
use crate::names::Names;
use crate::read_buffers::ReadBuffers;
use crate::room::allocate_as;
use crate::workers::Workers;
use crate::xattr::DEFAULT_ACL;

/// Maximum number of bytes that one request copies between files. The program asks again.
const COPY_BYTES_MAX: u64 = 8 << 20;
/// Bytes of a buffer for copies between files, and of one for directory entries.
const BUFFER_BYTES: usize = 128 << 10;

/// A mounted directory.
pub struct Volume {
    pub table: Arc<Table>,
    pub files: Files,
    pub workers: Workers,
    pub read_buffers: ReadBuffers,
    /// This program acts as root: each user owns what its programs create.
    is_root: bool,
    /// Files are served past the kernel's page cache. Shared maps are refused: nothing would order
    /// them with writes.
    pub is_direct: bool,
    pub names: Names,
    /// Open directories, by the number that the kernel got.
    directories: Mutex<HashMap<u64, Arc<OwnedFd>>>,
    next_directory: AtomicU64,
    notifier: OnceLock<Notifier>,
}

/// A new inode: its permission bits and who gets it.
#[derive(Clone, Copy)]
pub struct Creation {
    pub mode: u32,
    pub umask: u32,
    pub owner: u32,
    pub group: u32,
}

impl Creation {
    pub fn new(request: &Request, mode: u32, umask: u32) -> Self {
        Self { mode, umask, owner: request.uid(), group: request.gid() }
    }
}

impl Volume {
    pub fn new(table: Arc<Table>, files: Files, workers: Workers, names_max: usize) -> Self {
        Self {
            table,
            files,
            workers,
            read_buffers: ReadBuffers::default(),
            is_root: rustix::process::geteuid().is_root(),
            is_direct: false,
            names: Names::new(names_max),
            directories: Mutex::default(),
            next_directory: AtomicU64::new(0),
            notifier: OnceLock::new(),
        }
    }

    /// Sets the way to the kernel's caches, once the session exists.
    pub fn set_notifier(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier);
    }

    /// Makes the kernel ask for the attributes of an inode again.
    pub fn forget_attributes(&self, number: INodeNo) {
        // A position below 0 stands for the attributes.
        let _ = self.notifier.get().map(|kernel| kernel.inval_inode(number, -1, 0));
    }

    /// Makes the kernel drop the pages of a file. Waits for reads that are on their way.
    pub fn forget_pages(&self, number: INodeNo) {
        let _ = self.notifier.get().map(|kernel| kernel.inval_inode(number, 0, 0));
    }

    pub fn lookup(&self, parent: INodeNo, name: &OsStr) -> Result<FileAttr> {
        self.attributes_of(&*self.table.lookup(&self.table.get(parent)?, name)?)
    }

    /// Returns the attributes of an inode that was looked up for the kernel. After an error the
    /// kernel has no reference of it.
    fn attributes_of(&self, inode: &Inode) -> Result<FileAttr> {
        inode.attributes().inspect_err(|_| self.forget(inode.number, 1))
    }

    /// Takes references that the kernel gives back.
    pub fn forget(&self, number: INodeNo, lookups: u64) {
        let Some(inode) = self.table.forget(number, lookups) else { return };
        // Relaxed: only the kernel, which has forgotten it, could open it again.
        if inode.is_cached.load(Ordering::Relaxed) {
            self.files.drop_removed(&inode);
        }
        self.files.kernel_pages.forget(&inode);
        let device = inode.key.0;
        drop(inode);
        self.files.removed.note_gone(device);
    }

    /// Records that the kernel gets a name.
    pub fn note_name(&self) {
        self.names.note(self.table.len());
    }

    /// Creates an inode by `make`, which gets the directory and the permission bits, and may return
    /// a descriptor of the inode. Looks it up, and returns its first status.
    fn create(
        &self,
        parent: INodeNo,
        name: &OsStr,
        creation: Creation,
        make: impl FnOnce(&Handle, Mode) -> rustix::io::Result<Option<OwnedFd>>,
    ) -> Result<(Arc<Inode>, Stat)> {
        let parent = self.table.get(parent)?;
        let directory = parent.handle()?;
        // The kernel leaves the umask to us, because a default access list takes its place.
        let masked = match rustix::fs::getxattr_query(path_of(&directory), DEFAULT_ACL) {
            Ok(length) if length > 0 => creation.mode,
            _ => creation.mode & !creation.umask,
        };
        let made = make(&directory, Mode::from_raw_mode(masked & 0o7777))?;
        let opened = made.map(|made| fstat(&made).map(|stat| (made, stat)));
        let opened =
            opened.unwrap_or_else(|| self.table.handles().retry(|| open_name(&directory, name)));
        let (made, stat) = opened?;
        let inode = self.table.found(&parent, name, made, &stat);
        if self.is_root {
            // In a directory with the set-group-id bit the group is inherited.
            let inherits = parent.stat()?.st_mode & libc::S_ISGID != 0;
            let given = inode.give_to(&stat, creation.owner, (!inherits).then_some(creation.group));
            given.inspect_err(|_| self.forget(inode.number, 1))?;
        }
        Ok((inode, stat))
    }

    /// Creates a file and opens it. Returns its attributes, the number of the handle, and how the
    /// program uses it.
    pub fn create_file(
        &self,
        parent: INodeNo,
        name: &OsStr,
        creation: Creation,
        flags: OFlags,
    ) -> Result<(FileAttr, u64, FopenFlags)> {
        let access =
            OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let created = self.create(parent, name, creation, |parent, mode| {
            let create = || openat(parent, name, access, mode);
            self.table.handles().retry(create).map(Some)
        });
        let (inode, status) = match created {
            Err(crate::error::Error::System(Errno::EXIST)) if !flags.contains(OFlags::EXCL) => {
                (self.table.lookup(&self.table.get(parent)?, name)?, None)
            }
            created => {
                let (inode, status) = created?;
                inode.data().has_no_capability = true;
                (inode, Some(status))
            }
        };
        let opened = self.open_created(&inode, flags, status);
        opened.inspect_err(|_| self.forget(inode.number, 1))
    }

    fn open_created(
        &self,
        inode: &Arc<Inode>,
        flags: OFlags,
        status: Option<Stat>,
    ) -> Result<(FileAttr, u64, FopenFlags)> {
        self.files.throttle(inode.key.0);
        let access = Access::of(flags.bits() as i32);
        let opening = self.files.open_with(inode, access, status)?;
        let attributes = inode.attributes().inspect_err(|_| {
            self.files.release(inode, opening.handle, access);
        });
        Ok((attributes?, opening.handle, self.open_flags(opening)))
    }

    pub fn mknod(
        &self,
        parent: INodeNo,
        name: &OsStr,
        creation: Creation,
        device: u32,
    ) -> Result<FileAttr> {
        let kind = FileType::from_raw_mode(creation.mode);
        let make = |parent: &Handle, mode| {
            mknodat(parent, name, kind, mode, u64::from(device)).map(|()| None)
        };
        self.attributes_of(&self.create(parent, name, creation, make)?.0)
    }

    pub fn mkdir(&self, parent: INodeNo, name: &OsStr, creation: Creation) -> Result<FileAttr> {
        let make = |parent: &Handle, mode| mkdirat(parent, name, mode).map(|()| None);
        self.attributes_of(&self.create(parent, name, creation, make)?.0)
    }

    pub fn symlink(
        &self,
        parent: INodeNo,
        name: &OsStr,
        target: &OsStr,
        creation: Creation,
    ) -> Result<FileAttr> {
        let make = |parent: &Handle, _| symlinkat(target, parent, name).map(|()| None);
        self.attributes_of(&self.create(parent, name, creation, make)?.0)
    }

    pub fn readlink(&self, number: INodeNo) -> Result<Vec<u8>> {
        Ok(readlinkat(self.table.get(number)?.handle()?, c"", Vec::new())?.into_bytes())
    }

    pub fn link(&self, number: INodeNo, parent: INodeNo, name: &OsStr) -> Result<FileAttr> {
        let (inode, parent) = (self.table.get(number)?, self.table.get(parent)?);
        let directory = parent.handle()?;
        inode.with_path(|path| linkat(CWD, path, &directory, name, AtFlags::SYMLINK_FOLLOW))?;
        inode.data().touch();
        self.attributes_of(&*self.table.lookup(&parent, name)?)
    }

    pub fn unlink(&self, parent: INodeNo, name: &OsStr, flags: AtFlags) -> Result<()> {
        let parent = self.table.get(parent)?;
        let inode = self.table.known(&parent, name);
        let pinned = Pinned::new(inode.as_ref());
        unlinkat(parent.handle()?, name, flags)?;
        if pinned.remove_place(&parent, name) {
            self.note_removed(inode.as_ref());
        }
        inode.iter().for_each(|inode| inode.data().touch());
        Ok(())
    }

    /// Records that an inode has lost all names that are known.
    fn note_removed(&self, inode: Option<&Arc<Inode>>) {
        let is_file = |inode: &&Arc<Inode>| inode.kind == FileType::RegularFile;
        if let Some(inode) = inode.filter(is_file).filter(|inode| inode.is_removed()) {
            self.files.removed.add(inode);
        }
    }

    /// Renames after the pages of the file are written: a program that replaces a file by a new
    /// version expects to find one of the two after a crash.
    pub fn rename(
        &self,
        (parent, name): (INodeNo, &OsStr),
        (new_parent, new_name): (INodeNo, &OsStr),
        flags: RenameFlags,
    ) -> Result<()> {
        let (parent, new_parent) = (self.table.get(parent)?, self.table.get(new_parent)?);
        let moved = self.table.known(&parent, name);
        if let Some(inode) = &moved
            && inode.kind == FileType::RegularFile
        {
            inode.write_pages()?;
        }
        let replaced = self.table.known(&new_parent, new_name);
        // The places of both are wrong for a moment.
        let pinned = [Pinned::new(moved.as_ref()), Pinned::new(replaced.as_ref())];
        renameat_with(parent.handle()?, name, new_parent.handle()?, new_name, flags)?;
        if let Some(inode) = &moved {
            inode.data().touch();
            pinned[0].remove_place(&parent, name);
            inode.set_place(&new_parent, new_name);
        }
        if let Some(inode) = &replaced {
            inode.data().touch();
            let is_removed = pinned[1].remove_place(&new_parent, new_name);
            if flags.contains(RenameFlags::EXCHANGE) {
                inode.set_place(&parent, name);
            } else if is_removed {
                self.note_removed(Some(inode));
            }
        }
        Ok(())
    }

    /// Changes attributes, the size first: it changes the times, which the program may set, too.
    pub fn change_attributes(
        &self,
        number: INodeNo,
        changes: &Changes,
        size: Option<u64>,
        is_by_root: bool,
    ) -> Result<FileAttr> {
        let inode = self.table.get(number)?;
        if let Some(size) = size {
            inode.clear_privileges(is_by_root)?;
            self.files.set_len(&inode, size)?;
        }
        if *changes != Changes::default() {
            inode.change_attributes(changes)?;
        }
        inode.attributes()
    }

    pub fn open_directory(&self, number: INodeNo) -> Result<u64> {
        let descriptor = self.table.get(number)?.open(OFlags::RDONLY | OFlags::DIRECTORY)?;
        // Relaxed: only hands out numbers.
        let opened = self.next_directory.fetch_add(1, Ordering::Relaxed);
        self.directories.lock().insert(opened, Arc::new(descriptor));
        Ok(opened)
    }

    fn directory(&self, opened: u64) -> Result<Arc<OwnedFd>> {
        self.directories.lock().get(&opened).cloned().ok_or(Errno::BADF.into())
    }

    pub fn close_directory(&self, opened: u64) {
        self.directories.lock().remove(&opened);
    }

    pub fn sync_directory(&self, opened: u64) -> Result<()> {
        Ok(fsync(&*self.directory(opened)?)?)
    }

    /// Reads entries from `position` on: each name with its inode number, its kind, and the
    /// position after it, until `entry` returns `false`.
    pub fn read_directory(
        &self,
        opened: u64,
        position: u64,
        mut entry: impl FnMut(&OsStr, u64, FileType, u64) -> bool,
    ) -> Result<()> {
        use std::os::unix::ffi::OsStrExt;
        let descriptor = self.directory(opened)?;
        seek(&*descriptor, SeekFrom::Start(position))?;
        let mut buffer = [MaybeUninit::uninit(); 32 << 10];
        let mut entries = RawDir::new(&*descriptor, &mut buffer);
        while let Some(found) = entries.next() {
            let found = found?;
            let name = OsStr::from_bytes(found.file_name().to_bytes());
            if !entry(name, found.ino(), found.file_type(), found.next_entry_cookie()) {
                break;
            }
        }
        Ok(())
    }

    /// Returns how programs use a file that they open. The kernel keeps the pages that it has: to
    /// drop them while a write is in progress would lose it to a store beside it.
    fn open_flags(&self, opening: Opening) -> FopenFlags {
        let mut flags = FopenFlags::empty();
        flags.set(FopenFlags::FOPEN_KEEP_CACHE, !opening.begins_anew);
        let direct = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        flags.set(direct, self.is_direct);
        flags
    }

    /// Opens a file, and closes others if too many are open. Returns the number of the handle, and
    /// how the program uses it.
    pub fn open_file(&self, number: INodeNo, flags: OpenFlags) -> Result<(u64, FopenFlags)> {
        let inode = self.table.get(number)?;
        self.files.throttle(inode.key.0);
        let opening = self.files.open(&inode, Access::of(flags.0))?;
        Ok((opening.handle, self.open_flags(opening)))
    }

    /// Clears what a change of the contents clears, and has the kernel ask for the mode again.
    fn clear_privileges(&self, inode: &Inode, is_by_root: bool) -> Result<()> {
        if inode.clear_privileges(is_by_root)? {
            // A position below 0 stands for the attributes.
            let _ = self.notifier.get().map(|kernel| kernel.inval_inode(inode.number, -1, 0));
        }
        Ok(())
    }

    /// Writes to a file that a program has open. Returns the number of bytes.
    ///
    /// # Errors
    /// Also those that would keep the bytes from the storage for lack of space.
    pub fn write(
        &self,
        (number, handle, user): (INodeNo, u64, u32),
        position: u64,
        bytes: &[u8],
        (flags, open_flags): (WriteFlags, OpenFlags),
    ) -> Result<u32> {
        let inode = self.table.get(number)?;
        let opened = inode.opened_for_change()?;
        let is_of_map = flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        // As elsewhere, stores to maps clear nothing.
        if !is_of_map {
            self.clear_privileges(&inode, !flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID))?;
        }
        let mut written = 0;
        while written < bytes.len() {
            let at = position + written as u64;
            match self.write_part(&inode, &opened, &bytes[written..], at, user) {
                Ok(0) => break,
                Ok(length) => written += length,
                Err(error) if is_of_map => {
                    let end = position + bytes.len() as u64;
                    self.files.note_lost(&inode, at..end, &error);
                    return Err(error);
                }
                // The program meets the error when it goes on.
                Err(_) if written > 0 => break,
                Err(error) => {
                    opened.undo(&inode);
                    return Err(error);
                }
            }
        }
        inode.note_written(written as u64);
        // The kernel leaves this to us, with direct I/O.
        if open_flags.0 & libc::O_DSYNC != 0 {
            inode.sync(handle, open_flags.0 & libc::O_SYNC == libc::O_SYNC)?;
        }
        Ok(written as u32)
    }

    /// Writes the first of some bytes, as many as there is room for. Returns their number.
    fn write_part(
        &self,
        inode: &Inode,
        opened: &Opened,
        bytes: &[u8],
        position: u64,
        user: u32,
    ) -> Result<usize> {
        let range = position..position.saturating_add(bytes.len() as u64);
        opened.allow_length(range.end)?;
        let room = self.files.make_room(inode, opened, range, user)?;
        let written = opened.file.write_at(&bytes[..room.length as usize], position)?;
        if room.must_sync {
            inode.write_bytes(opened, position..position + written as u64)?;
        }
        Ok(written)
    }

    /// Changes the allocation of an open file, in the modes that the cache has.
    pub fn allocate(&self, number: INodeNo, bytes: Range<u64>, mode: i32, user: u32) -> Result<()> {
        let inode = self.table.get(number)?;
        let opened = inode.opened_for_change()?;
        self.clear_privileges(&inode, user == 0)?;
        let mode = FallocateFlags::from_bits_retain(mode as u32);
        if mode.contains(FallocateFlags::PUNCH_HOLE) {
            return allocate_in(&opened.file, bytes, mode);
        }
        opened.allow_length(bytes.end)?;
        // What others were promised is not free.
        let _room = self.files.count_room(&inode, &opened, &bytes);
        let allocate = || {
            if user != 0 {
                allocate_as(user, &opened, &bytes)?;
            }
            allocate_in(&opened.file, bytes.clone(), mode)
        };
        loop {
            match allocate() {
                Err(error) if error.is_out_of_space() && self.files.removed.wait(inode.key.0) => {}
                allocated => return allocated,
            }
        }
    }

    /// Returns the position of the next data or the next hole.
    pub fn seek(&self, number: INodeNo, position: u64, what: i32) -> Result<u64> {
        let file = self.table.get(number)?.file()?;
        let found = match what {
            libc::SEEK_DATA => file.seek_data(position)?,
            libc::SEEK_HOLE => file.seek_hole(position)?,
            _ => return Err(Errno::INVAL.into()),
        };
        found.ok_or(Errno::NXIO.into())
    }

    /// Copies bytes between two open files, through the cache. Returns their number.
    pub fn copy(
        &self,
        (from, from_position): (INodeNo, u64),
        (to, to_position): (INodeNo, u64),
        length: u64,
        user: u32,
    ) -> Result<u64> {
        let source = self.table.get(from)?.file()?;
        let inode = self.table.get(to)?;
        // Stores to a map of the target would be lost, or copied bytes to them: the kernel drops
        // the pages afterwards, but may write them back before. It then copies by itself.
        let Some(_unmapped) = inode.hold_unmapped() else { return Err(Errno::OPNOTSUPP.into()) };
        let target = inode.opened_for_change()?;
        self.clear_privileges(&inode, user == 0)?;
        let length = length.min(COPY_BYTES_MAX);
        let mut buffer = vec![0; BUFFER_BYTES.min(length as usize)];
        let mut copied = 0;
        while copied < length {
            let wanted = buffer.len().min((length - copied) as usize);
            let read = source.read_at(&mut buffer[..wanted], from_position + copied)?;
            if read == 0 {
                break;
            }
            let position = to_position + copied;
            match self.write_part(&inode, &target, &buffer[..read], position, user) {
                // What was copied before counts; the program meets the error when it goes on.
                Err(_) if copied > 0 => break,
                Ok(0) => break,
                written => copied += written? as u64,
            }
        }
        inode.note_written(copied);
        Ok(copied)
    }

    pub fn statfs(&self, number: INodeNo) -> Result<StatVfs> {
        Ok(rustix::fs::fstatvfs(self.table.get(number)?.handle()?)?)
    }
}

fn allocate_in(file: &File, bytes: Range<u64>, mode: FallocateFlags) -> Result<()> {
    let (keep, punch) = (FallocateFlags::KEEP_SIZE, FallocateFlags::PUNCH_HOLE);
    let zero = FallocateFlags::ZERO_RANGE;
    match mode {
        _ if mode.is_empty() => file.allocate(bytes)?,
        _ if mode == keep => file.allocate_keep_len(bytes)?,
        _ if mode == keep | punch => file.punch_hole(bytes)?,
        _ if mode == keep | zero => file.zero_range(bytes)?,
        _ if mode == zero => {
            file.allocate(bytes.clone())?;
            file.zero_range(bytes)?;
        }
        _ => return Err(Errno::OPNOTSUPP.into()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio::Cache;
    use std::time::Duration;

    /// The kernel forgets only what it was told.
    #[test]
    fn a_creation_that_fails_leaves_no_inode() {
        let directory = tempfile::tempdir().unwrap();
        let root = std::fs::File::open(directory.path()).unwrap();
        let table = Arc::new(Table::new(root.into(), Duration::from_secs(1), 1).unwrap());
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let files = Files::new(cache, Arc::clone(&table), 1, 1);
        let volume = Volume::new(table, files, Workers::new(1), 1);
        let creation = Creation { mode: libc::S_IFIFO | 0o600, umask: 0, owner: 0, group: 0 };
        let number = volume.mknod(INodeNo::ROOT, OsStr::new("fifo"), creation, 0).unwrap().ino;
        volume.forget(number, 1);
        assert_eq!(volume.table.len(), 1);
        // It exists, and cannot be opened as a file.
        let creation = Creation { mode: 0o600, ..creation };
        let created = volume.create_file(INodeNo::ROOT, OsStr::new("fifo"), creation, OFlags::RDWR);
        assert!(created.is_err());
        assert_eq!(volume.table.len(), 1);
    }
}
