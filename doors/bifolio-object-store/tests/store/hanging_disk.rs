//! A disk that hangs when it is told to: a FUSE file system in this process, over a directory.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bifolio_testing::skip;
use fuser::{
    BackgroundSession, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rustix::mount::{UnmountFlags, unmount};
use tempfile::TempDir;

/// Reads and writes that wait until the disk answers again; `None` while it answers.
type Held = Arc<Mutex<Option<Vec<Box<dyn FnOnce() + Send>>>>>;

/// A mounted directory, which is unmounted on drop. What a test has leaked keeps files of it open:
/// they fail from then on. The process could not end otherwise, because closing a file waits for its
/// server, which is in the process.
pub struct HangingDisk {
    held: Held,
    /// Set if only the file `parts` hangs.
    only_parts: Arc<AtomicBool>,
    /// Where the kernel is told to end it.
    abort: PathBuf,
    _session: BackgroundSession,
    target: TempDir,
    _source: TempDir,
}

impl HangingDisk {
    /// Mounts an empty file system. `None`, after a report, where that is not possible.
    #[track_caller]
    pub fn mount() -> Option<Self> {
        let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (held, only_parts) = (Held::default(), Arc::<AtomicBool>::default());
        let server = Server {
            source: source.path().to_owned(),
            files: Mutex::default(),
            held: Arc::clone(&held),
            only_parts: Arc::clone(&only_parts),
        };
        match fuser::spawn_mount(server, target.path(), &fuser::Config::default()) {
            Ok(session) => {
                // The kernel names connections by the minor number of their device.
                let device = fs::metadata(target.path()).unwrap().dev();
                let number = rustix::fs::minor(device);
                let abort = format!("/sys/fs/fuse/connections/{number}/abort").into();
                Some(Self { held, only_parts, abort, _session: session, target, _source: source })
            }
            Err(error) => {
                skip("fuse", format!("cannot mount: {error}"));
                None
            }
        }
    }

    pub fn path(&self) -> &Path {
        self.target.path()
    }

    /// Lets all reads and writes wait until the result is dropped. Files that are open may wait for
    /// the disk when they are closed: keep the result in a scope within theirs.
    #[must_use]
    pub fn hang(&self) -> Hang {
        self.held.lock().unwrap().get_or_insert_default();
        Hang(Arc::clone(&self.held))
    }

    /// Acts as [`Self::hang`], but only for the file `parts`.
    #[must_use]
    pub fn hang_parts(&self) -> Hang {
        self.only_parts.store(true, Ordering::SeqCst);
        self.hang()
    }

    /// Returns the number of reads and writes that wait.
    pub fn waiting(&self) -> usize {
        self.held.lock().unwrap().as_ref().map_or(0, Vec::len)
    }
}

impl Drop for HangingDisk {
    fn drop(&mut self) {
        // The session does not unmount what was aborted.
        let _ = unmount(self.target.path(), UnmountFlags::DETACH);
        // Fails if that has ended it, and where fusectl is not mounted: then leaks of tests may keep
        // the process.
        let _ = fs::write(&self.abort, "1");
    }
}

/// A hang, which ends when this is dropped: what waits is answered.
pub struct Hang(Held);

impl Drop for Hang {
    fn drop(&mut self) {
        let held = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        held.into_iter().flatten().for_each(|action| action());
    }
}

struct Server {
    source: PathBuf,
    /// The file with inode number `n` is at `n - 2`.
    files: Mutex<Vec<(PathBuf, Arc<File>)>>,
    held: Held,
    only_parts: Arc<AtomicBool>,
}

impl Server {
    /// Returns the inode number of a file, which it opens.
    fn number(&self, name: &OsStr, is_new: bool) -> io::Result<u64> {
        let path = self.source.join(name);
        let mut files = self.files.lock().unwrap();
        if let Some(index) = files.iter().position(|(known, _)| *known == path) {
            return Ok(index as u64 + 2);
        }
        let file = File::options().read(true).write(true).create(is_new).open(&path)?;
        files.push((path, Arc::new(file)));
        Ok(files.len() as u64 + 1)
    }

    fn file(&self, number: INodeNo) -> Arc<File> {
        Arc::clone(&self.files.lock().unwrap()[number.0 as usize - 2].1)
    }

    fn attributes(&self, number: INodeNo) -> io::Result<FileAttr> {
        let metadata = match number {
            INodeNo::ROOT => fs::metadata(&self.source)?,
            _ => self.file(number).metadata()?,
        };
        let time = SystemTime::UNIX_EPOCH;
        Ok(FileAttr {
            ino: number,
            size: metadata.len(),
            blocks: metadata.blocks(),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind: if metadata.is_dir() { FileType::Directory } else { FileType::RegularFile },
            perm: 0o700,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn do_or_hold(&self, number: INodeNo, action: impl FnOnce() + Send + 'static) {
        let is_parts = self.files.lock().unwrap()[number.0 as usize - 2].0.ends_with("parts");
        let mut held = self.held.lock().unwrap();
        match &mut *held {
            Some(waiting) if is_parts || !self.only_parts.load(Ordering::SeqCst) => {
                waiting.push(Box::new(action))
            }
            _ => {
                drop(held);
                action();
            }
        }
    }
}

const VALID: Duration = Duration::ZERO;

impl Filesystem for Server {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.number(name, false).and_then(|number| self.attributes(INodeNo(number))) {
            Ok(attributes) => reply.entry(&VALID, &attributes, Generation(0)),
            Err(error) => reply.error(error.into()),
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(number) {
            Ok(attributes) => reply.attr(&VALID, &attributes),
            Err(error) => reply.error(error.into()),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let resized = size.map_or(Ok(()), |size| self.file(number).set_len(size));
        match resized.and_then(|()| self.attributes(number)) {
            Ok(attributes) => reply.attr(&VALID, &attributes),
            Err(error) => reply.error(error.into()),
        }
    }

    fn create(
        &self,
        _: &Request,
        _: INodeNo,
        name: &OsStr,
        _: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        match self.number(name, true).and_then(|number| self.attributes(INodeNo(number))) {
            Ok(attributes) => {
                let (generation, flags) = (Generation(0), FopenFlags::empty());
                reply.created(&VALID, &attributes, generation, FileHandle(0), flags);
            }
            Err(error) => reply.error(error.into()),
        }
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        position: u64,
        length: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let file = self.file(number);
        self.do_or_hold(number, move || {
            let mut bytes = vec![0; length as usize];
            match file.read_at(&mut bytes, position) {
                Ok(length) => reply.data(&bytes[..length]),
                Err(error) => reply.error(error.into()),
            }
        });
    }

    fn write(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        position: u64,
        bytes: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let (file, bytes) = (self.file(number), bytes.to_vec());
        self.do_or_hold(number, move || match file.write_all_at(&bytes, position) {
            Ok(()) => reply.written(bytes.len() as u32),
            Err(error) => reply.error(error.into()),
        });
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, number: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.file(number).sync_all() {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(Errno::from(error)),
        }
    }
}
