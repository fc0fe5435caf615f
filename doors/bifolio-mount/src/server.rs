//! The requests of the kernel: each is decoded, done by the [`Volume`], and answered.
//!
//! A request that may wait for a device is served by [`Workers::run`], so that a device that hangs
//! stops only the programs that use its files. Reads of resident pages are served at once. Locks of
//! files (`flock`, `fcntl`) and checks of permissions are left to the kernel.
//!
//! [`Workers::run`]: crate::workers::Workers::run

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, Filesystem, FopenFlags,
    Generation, INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{AtFlags, OFlags};

use crate::attributes::{Changes, kind};
use crate::data::Access;
use crate::error::Result;
use crate::volume::{Creation, Volume};
use crate::workers::WORKERS_MAX;
use crate::xattr::Answer;

/// Time for which the kernel may use names and attributes without asking.
const VALID: Duration = Duration::from_secs(1);
/// Maximum length of one request to read or write.
const TRANSFER_BYTES_MAX: u32 = 1 << 20;
/// Maximum length of a read for which each thread has a buffer of its own.
const SHORT_BYTES_MAX: u32 = 64 << 10;
/// Maximum number of requests that the kernel sends at a time for asynchronous I/O of programs and
/// for pages of its cache, as many as may hang.
const BACKGROUND_MAX: u16 = WORKERS_MAX as u16;
/// Inode numbers are not reused while the kernel knows them.
const GENERATION: Generation = Generation(0);

thread_local! {
    /// The bytes of a read, on their way from the cache to the kernel.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Serves the requests of a mount.
pub struct Server {
    pub volume: Arc<Volume>,
}

/// A reply that carries an error instead of a result.
trait Refuse {
    fn refuse(self, error: Errno);
}

macro_rules! refuse {
    ($($reply:ident)*) => {
        $(impl Refuse for $reply {
            fn refuse(self, error: Errno) {
                self.error(error);
            }
        })*
    };
}

refuse! { ReplyAttr ReplyCreate ReplyData ReplyDirectory ReplyEmpty ReplyEntry }
refuse! { ReplyLseek ReplyOpen ReplyStatfs ReplyWrite ReplyXattr }

impl Volume {
    /// Answers with a name that the kernel remembers.
    fn answer_entry(&self, reply: ReplyEntry, result: Result<FileAttr>) {
        answer(reply, result, send_entry);
        self.note_name();
    }
}

/// Sends the result by `send`, or the error.
fn answer<T, R: Refuse>(reply: R, result: Result<T>, send: impl FnOnce(R, T)) {
    match result {
        Ok(value) => send(reply, value),
        Err(error) => reply.refuse(error.answer()),
    }
}

fn send_entry(reply: ReplyEntry, attributes: FileAttr) {
    reply.entry(&VALID, &attributes, GENERATION);
}

fn send_attributes(reply: ReplyAttr, attributes: FileAttr) {
    reply.attr(&VALID, &attributes);
}

fn send_done(reply: ReplyEmpty, (): ()) {
    reply.ok();
}

fn send_xattr(reply: ReplyXattr, answer: Answer) {
    match answer {
        Answer::Length(length) => reply.size(length as u32),
        Answer::Bytes(bytes) => reply.data(&bytes),
    }
}

impl Server {
    /// Does a request that may wait.
    fn run(&self, job: impl FnOnce(&Volume) + Send + 'static) {
        let volume = Arc::clone(&self.volume);
        self.volume.workers.run(move || job(&volume));
    }
}

/// Runs `read` with a buffer of this thread.
fn with_read_buffer<T>(size: u32, read: impl FnOnce(&mut [u8]) -> T) -> T {
    READ_BUFFER.with_borrow_mut(|buffer| {
        let size = size as usize;
        buffer.resize(buffer.len().max(size), 0);
        read(&mut buffer[..size])
    })
}

impl Volume {
    /// Answers with the bytes up to the end of the file, if nothing has to be waited for. Returns
    /// the reply otherwise, and if a part is missing, which is then read again with the rest.
    fn try_read(
        &self,
        number: INodeNo,
        position: u64,
        size: u32,
        reply: ReplyData,
    ) -> Option<ReplyData> {
        let Ok(inode) = self.table.get(number) else { return Some(reply) };
        let Some(file) = inode.try_file() else { return Some(reply) };
        with_read_buffer(size, |buffer| match file.try_read_at(buffer, position) {
            Ok(length) if length == buffer.len() || position + length as u64 >= file.len() => {
                reply.data(&buffer[..length]);
                self.files.kernel_pages.note(&inode, length as u64);
                None
            }
            _ => Some(reply),
        })
    }

    /// Reads, and answers with the bytes up to the end of the file.
    fn read(&self, number: INodeNo, position: u64, size: u32, reply: ReplyData) {
        let opened = self.table.get(number).and_then(|inode| Ok((inode.file()?, inode)));
        let (file, inode) = match opened {
            Ok(opened) => opened,
            Err(error) => return reply.error(error.answer()),
        };
        let read = |buffer: &mut [u8]| match file.read_at(buffer, position) {
            Ok(length) => {
                reply.data(&buffer[..length]);
                self.files.kernel_pages.note(&inode, length as u64);
            }
            Err(error) => reply.error(crate::error::Error::from(error).answer()),
        };
        if size <= SHORT_BYTES_MAX {
            return with_read_buffer(size, read);
        }
        self.read_buffers.with(inode.key.0, size, read);
    }
}

impl Filesystem for Server {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_ASYNC_DIO
            | InitFlags::FUSE_DONT_MASK
            // The kernel's pages are right, whatever size and times are answered.
            | InitFlags::FUSE_EXPLICIT_INVAL_DATA
            | InitFlags::FUSE_HANDLE_KILLPRIV_V2
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_POSIX_ACL;
        // Older kernels do without some of them.
        let known = config.capabilities();
        let _ = config.add_capabilities(wanted & known);
        let _ = config.set_max_write(TRANSFER_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.to_owned();
        self.run(move |volume| volume.answer_entry(reply, volume.lookup(parent, &name)));
    }

    fn forget(&self, _request: &Request, number: INodeNo, lookups: u64) {
        self.run(move |volume| volume.forget(number, lookups));
    }

    fn getattr(
        &self,
        _request: &Request,
        number: INodeNo,
        _file: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        self.run(move |volume| {
            let attributes = volume.table.get(number).and_then(|inode| inode.attributes());
            answer(reply, attributes, send_attributes);
        });
    }

    fn setattr(
        &self,
        request: &Request,
        number: INodeNo,
        mode: Option<u32>,
        owner: Option<u32>,
        group: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _changed: Option<SystemTime>,
        _file: Option<FileHandle>,
        _created: Option<SystemTime>,
        _changed_too: Option<SystemTime>,
        _backed_up: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changes = Changes { mode, owner, group, accessed, modified };
        let is_root = request.uid() == 0;
        self.run(move |volume| {
            let changed = volume.change_attributes(number, &changes, size, is_root);
            answer(reply, changed, send_attributes);
        });
    }

    fn readlink(&self, _request: &Request, number: INodeNo, reply: ReplyData) {
        self.run(move |volume| {
            answer(reply, volume.readlink(number), |reply, target| reply.data(&target));
        });
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        device: u32,
        reply: ReplyEntry,
    ) {
        let (name, creation) = (name.to_owned(), Creation::new(request, mode, umask));
        self.run(move |volume| {
            volume.answer_entry(reply, volume.mknod(parent, &name, creation, device));
        });
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let (name, creation) = (name.to_owned(), Creation::new(request, mode, umask));
        self.run(move |volume| volume.answer_entry(reply, volume.mkdir(parent, &name, creation)));
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        self.run(move |volume| {
            answer(reply, volume.unlink(parent, &name, AtFlags::empty()), send_done);
        });
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        self.run(move |volume| {
            answer(reply, volume.unlink(parent, &name, AtFlags::REMOVEDIR), send_done);
        });
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let (name, target) = (name.to_owned(), target.as_os_str().to_owned());
        let creation = Creation::new(request, 0o777, 0);
        self.run(move |volume| {
            volume.answer_entry(reply, volume.symlink(parent, &name, &target, creation));
        });
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (name, new_name) = (name.to_owned(), new_name.to_owned());
        let flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
        self.run(move |volume| {
            let renamed = volume.rename((parent, &name), (new_parent, &new_name), flags);
            answer(reply, renamed, send_done);
        });
    }

    fn link(
        &self,
        _request: &Request,
        number: INodeNo,
        parent: INodeNo,
        name: &OsStr,
        reply: ReplyEntry,
    ) {
        let name = name.to_owned();
        self.run(move |volume| volume.answer_entry(reply, volume.link(number, parent, &name)));
    }

    fn open(&self, _request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.run(move |volume| {
            answer(reply, volume.open_file(number, flags), |reply, (handle, flags)| {
                reply.opened(FileHandle(handle), flags);
            });
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let (name, creation) = (name.to_owned(), Creation::new(request, mode, umask));
        let flags = OFlags::from_bits_retain(flags as u32);
        self.run(move |volume| {
            let created = volume.create_file(parent, &name, creation, flags);
            answer(reply, created, |reply, (attributes, handle, flags)| {
                volume.note_name();
                reply.created(&VALID, &attributes, GENERATION, FileHandle(handle), flags);
            });
        });
    }

    fn read(
        &self,
        _request: &Request,
        number: INodeNo,
        _file: FileHandle,
        position: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if let Some(reply) = self.volume.try_read(number, position, size, reply) {
            self.run(move |volume| volume.read(number, position, size, reply));
        }
    }

    fn write(
        &self,
        request: &Request,
        number: INodeNo,
        file: FileHandle,
        position: u64,
        bytes: &[u8],
        write_flags: WriteFlags,
        open_flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let volume = Arc::clone(&self.volume);
        let from = (number, file.0, request.uid());
        self.volume.workers.run_write(bytes, move |bytes| {
            let written = volume.write(from, position, bytes, (write_flags, open_flags));
            answer(reply, written, |reply, length| reply.written(length));
        });
    }

    fn flush(
        &self,
        _request: &Request,
        number: INodeNo,
        file: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.run(move |volume| {
            let written = volume.table.get(number).and_then(|inode| inode.write_out(file.0));
            answer(reply, written, send_done);
        });
    }

    fn release(
        &self,
        _request: &Request,
        number: INodeNo,
        file: FileHandle,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.run(move |volume| match volume.table.get(number) {
            Ok(inode) => {
                let must_close = volume.files.release(&inode, file.0, Access::of(flags.0));
                reply.ok();
                if must_close {
                    volume.files.close_released(&inode);
                }
            }
            Err(error) => reply.error(error.answer()),
        });
    }

    fn fsync(
        &self,
        _request: &Request,
        number: INodeNo,
        file: FileHandle,
        only_data: bool,
        reply: ReplyEmpty,
    ) {
        self.run(move |volume| {
            let synced = volume.table.get(number).and_then(|inode| inode.sync(file.0, !only_data));
            answer(reply, synced, send_done);
        });
    }

    fn opendir(&self, _request: &Request, number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.run(move |volume| {
            answer(reply, volume.open_directory(number), |reply, opened| {
                reply.opened(FileHandle(opened), FopenFlags::empty());
            });
        });
    }

    fn readdir(
        &self,
        _request: &Request,
        _number: INodeNo,
        opened: FileHandle,
        position: u64,
        mut reply: ReplyDirectory,
    ) {
        self.run(move |volume| {
            let read = volume.read_directory(opened.0, position, |name, inode, what, next| {
                !reply.add(INodeNo(inode), next, kind(what), name)
            });
            answer(reply, read, |reply, ()| reply.ok());
        });
    }

    fn releasedir(
        &self,
        _request: &Request,
        _number: INodeNo,
        opened: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.volume.close_directory(opened.0);
        reply.ok();
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        _number: INodeNo,
        opened: FileHandle,
        _only_data: bool,
        reply: ReplyEmpty,
    ) {
        self.run(move |volume| answer(reply, volume.sync_directory(opened.0), send_done));
    }

    fn statfs(&self, _request: &Request, number: INodeNo, reply: ReplyStatfs) {
        self.run(move |volume| {
            answer(reply, volume.statfs(number), |reply, stat| {
                let (blocks, free, available) = (stat.f_blocks, stat.f_bfree, stat.f_bavail);
                let (block, fragment) = (stat.f_bsize as u32, stat.f_frsize as u32);
                let (files, free_files, name) = (stat.f_files, stat.f_ffree, stat.f_namemax as u32);
                reply.statfs(blocks, free, available, files, free_files, block, name, fragment);
            });
        });
    }

    fn setxattr(
        &self,
        _request: &Request,
        number: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let (name, value) = (name.to_owned(), value.to_vec());
        self.run(move |volume| {
            answer(reply, volume.set_xattr(number, &name, &value, flags), send_done);
        });
    }

    fn getxattr(
        &self,
        _request: &Request,
        number: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        let name = name.to_owned();
        self.run(move |volume| {
            answer(reply, volume.xattr(number, &name, size), send_xattr);
        });
    }

    fn listxattr(&self, request: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let is_root = request.uid() == 0;
        self.run(move |volume| answer(reply, volume.xattrs(number, size, is_root), send_xattr));
    }

    fn removexattr(&self, _request: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        self.run(move |volume| answer(reply, volume.remove_xattr(number, &name), send_done));
    }

    fn fallocate(
        &self,
        request: &Request,
        number: INodeNo,
        _file: FileHandle,
        position: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let user = request.uid();
        self.run(move |volume| {
            let bytes = position..position.saturating_add(length);
            answer(reply, volume.allocate(number, bytes, mode, user), send_done);
        });
    }

    fn lseek(
        &self,
        _request: &Request,
        number: INodeNo,
        _file: FileHandle,
        position: i64,
        what: i32,
        reply: ReplyLseek,
    ) {
        self.run(move |volume| {
            let found = volume.seek(number, position as u64, what);
            answer(reply, found, |reply, found| reply.offset(found as i64));
        });
    }

    fn copy_file_range(
        &self,
        request: &Request,
        from: INodeNo,
        _from_file: FileHandle,
        from_position: u64,
        to: INodeNo,
        _to_file: FileHandle,
        to_position: u64,
        length: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let user = request.uid();
        self.run(move |volume| {
            let copied = volume.copy((from, from_position), (to, to_position), length, user);
            answer(reply, copied, |reply, length| reply.written(length as u32));
        });
    }
}
