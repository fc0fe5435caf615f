//! A pass-through mount of one flat directory, for comparisons with `bifolio-mount`: as small as a
//! FUSE file system can be, with nothing between the kernel and the files.
//!
//! `passthrough SOURCE TARGET` uses the kernel's page cache twice, above and below FUSE; with
//! `--uncached` only below it, so that each access is a request; with `--direct` not at all
//! (`O_DIRECT`). Ends when it is unmounted. `examples/compare.rs` runs it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyWrite, Request, SessionACL, TimeOrNow, WriteFlags,
};

const VALID: Duration = Duration::from_secs(60);
const ALIGNMENT: usize = 4096;

struct Passthrough {
    source: PathBuf,
    /// Each access is a request.
    is_uncached: bool,
    /// The files are opened with `O_DIRECT`.
    is_direct: bool,
    files: RwLock<HashMap<u64, Arc<File>>>,
}

fn attributes(ino: INodeNo, metadata: &Metadata) -> FileAttr {
    let time = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
    FileAttr {
        ino,
        size: metadata.len(),
        blocks: metadata.blocks(),
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind: if metadata.is_dir() { FileType::Directory } else { FileType::RegularFile },
        perm: (metadata.mode() & 0o7777) as u16,
        nlink: 1,
        uid: metadata.uid(),
        gid: metadata.gid(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Passthrough {
    fn open(&self, name: &OsStr, create: bool) -> io::Result<(INodeNo, FileAttr)> {
        let flags = if self.is_direct { libc::O_DIRECT } else { 0 };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(create).custom_flags(flags);
        let file = options.open(self.source.join(name))?;
        let metadata = file.metadata()?;
        let number = INodeNo(metadata.ino());
        self.files.write().unwrap().entry(number.0).or_insert_with(|| Arc::new(file));
        Ok((number, attributes(number, &metadata)))
    }

    fn file(&self, number: INodeNo) -> Arc<File> {
        Arc::clone(&self.files.read().unwrap()[&number.0])
    }

    fn attributes(&self, number: INodeNo) -> io::Result<FileAttr> {
        let metadata = match number {
            INodeNo::ROOT => self.source.metadata()?,
            _ => self.file(number).metadata()?,
        };
        Ok(attributes(number, &metadata))
    }

    fn open_flags(&self) -> FopenFlags {
        match self.is_uncached {
            true => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
            false => FopenFlags::FOPEN_KEEP_CACHE,
        }
    }
}

/// Runs `transfer` with a part of a buffer that is aligned for `O_DIRECT`.
fn with_aligned<T>(length: usize, transfer: impl FnOnce(&mut [u8]) -> T) -> T {
    thread_local!(static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) });
    BUFFER.with_borrow_mut(|buffer| {
        buffer.resize(buffer.len().max(length + ALIGNMENT), 0);
        let start = buffer.as_ptr().align_offset(ALIGNMENT);
        transfer(&mut buffer[start..start + length])
    })
}

impl Filesystem for Passthrough {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_ASYNC_DIO | InitFlags::FUSE_PARALLEL_DIROPS;
        let known = config.capabilities();
        let _ = config.add_capabilities(wanted & known);
        let _ = config.set_max_write(1 << 20);
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.open(name, false) {
            Ok((_, attributes)) => reply.entry(&VALID, &attributes, Generation(0)),
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
        match self.open(name, true) {
            Ok((_, attributes)) => {
                reply.created(&VALID, &attributes, Generation(0), FileHandle(0), self.open_flags());
            }
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
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changed = size.map_or(Ok(()), |size| self.file(number).set_len(size));
        match changed.and_then(|()| self.attributes(number)) {
            Ok(attributes) => reply.attr(&VALID, &attributes),
            Err(error) => reply.error(error.into()),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), self.open_flags());
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        position: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let file = self.file(number);
        with_aligned(size as usize, |buffer| match file.read_at(buffer, position) {
            Ok(length) => reply.data(&buffer[..length]),
            Err(error) => reply.error(error.into()),
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
        let file = self.file(number);
        let written = if self.is_direct {
            with_aligned(bytes.len(), |buffer| {
                buffer.copy_from_slice(bytes);
                file.write_at(buffer, position)
            })
        } else {
            file.write_at(bytes, position)
        };
        match written {
            Ok(length) => reply.written(length as u32),
            Err(error) => reply.error(error.into()),
        }
    }

    fn fsync(&self, _: &Request, number: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.file(number).sync_data() {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error.into()),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // The kernel does not ask again.
        reply.error(Errno::ENOSYS);
    }
}

fn main() {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [source, target, rest @ ..] = &arguments[..] else {
        eprintln!("passthrough SOURCE TARGET [--uncached | --direct]");
        std::process::exit(2);
    };
    let has = |option| rest.iter().any(|argument| argument == option);
    let is_direct = has("--direct");
    let is_uncached = is_direct || has("--uncached");
    let files = RwLock::default();
    let passthrough = Passthrough { source: source.into(), is_uncached, is_direct, files };
    let mut config = Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(4);
    config.clone_fd = true;
    fuser::mount(passthrough, target, &config).expect("the directory can be mounted");
}
