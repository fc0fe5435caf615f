//! A device that refuses writes or flushes for a while: a file system of this test, under the
//! mount. Each handle that is open learns of it once, and the file can be used again afterwards.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use tempfile::TempDir;

use crate::mounted::{Mounted, can_mount};

const VALID: Duration = Duration::from_secs(60);

/// Refusals of the device, each with an error number.
#[derive(Clone, Copy, Default)]
struct Refused {
    writes: Option<i32>,
    flushes: Option<i32>,
    /// Refused writes and flushes so far.
    count: u64,
}

/// A device with files named `0` to `9`, empty at first.
#[derive(Default)]
struct Device {
    refused: Mutex<Refused>,
    files: Mutex<HashMap<u64, Vec<u8>>>,
}

impl Device {
    fn refuse(&self, writes: Option<i32>, flushes: Option<i32>) {
        let mut refused = self.refused.lock().unwrap();
        (refused.writes, refused.flushes) = (writes, flushes);
    }

    fn recover(&self) {
        self.refuse(None, None);
    }

    fn wait_until_refused(&self) {
        let before = self.refused.lock().unwrap().count;
        until(|| self.refused.lock().unwrap().count > before);
    }

    fn check(&self, which: impl Fn(&Refused) -> Option<i32>) -> Option<Errno> {
        let mut refused = self.refused.lock().unwrap();
        let number = which(&refused);
        refused.count += u64::from(number.is_some());
        number.map(Errno::from_i32)
    }

    fn contents(&self, file: u64) -> Vec<u8> {
        self.files.lock().unwrap().get(&(file + 2)).cloned().unwrap_or_default()
    }

    fn attributes(&self, ino: INodeNo) -> FileAttr {
        let time = SystemTime::UNIX_EPOCH;
        let is_root = ino == INodeNo::ROOT;
        let size = self.files.lock().unwrap().get(&ino.0).map_or(0, |file| file.len() as u64);
        FileAttr {
            ino,
            size,
            blocks: size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind: if is_root { FileType::Directory } else { FileType::RegularFile },
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

struct DeviceServer(Arc<Device>);

impl Filesystem for DeviceServer {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str().and_then(|name| name.parse::<u64>().ok()) {
            Some(number) if number < 10 => {
                let attributes = self.0.attributes(INodeNo(2 + number));
                reply.entry(&VALID, &attributes, Generation(0));
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&VALID, &self.0.attributes(number));
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
        if let Some(size) = size {
            let mut files = self.0.files.lock().unwrap();
            files.entry(number.0).or_default().resize(size as usize, 0);
        }
        reply.attr(&VALID, &self.0.attributes(number));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
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
        let contents = self.0.contents(number.0 - 2);
        let start = contents.len().min(position as usize);
        let end = contents.len().min(start + size as usize);
        reply.data(&contents[start..end]);
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
        if let Some(error) = self.0.check(|refused| refused.writes) {
            return reply.error(error);
        }
        let mut files = self.0.files.lock().unwrap();
        let file = files.entry(number.0).or_default();
        let (start, end) = (position as usize, position as usize + bytes.len());
        file.resize(file.len().max(end), 0);
        file[start..end].copy_from_slice(bytes);
        reply.written(bytes.len() as u32);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.0.check(|refused| refused.flushes) {
            Some(error) => reply.error(error),
            None => reply.ok(),
        }
    }
}

/// A mount of a directory with the device in it, as `device`.
struct WithDevice {
    device: Arc<Device>,
    mounted: Mounted,
    session: BackgroundSession,
    _source: TempDir,
}

impl WithDevice {
    #[track_caller]
    fn new() -> Option<Self> {
        if !can_mount() {
            return None;
        }
        let source = tempfile::tempdir().unwrap();
        let path = source.path().join("device");
        fs::create_dir(&path).unwrap();
        let device = Arc::new(Device::default());
        let server = DeviceServer(Arc::clone(&device));
        let session = fuser::spawn_mount(server, &path, &fuser::Config::default()).unwrap();
        let mounted = Mounted::of(source.path(), &["--memory", "8M"]).unwrap();
        Some(Self { device, mounted, session, _source: source })
    }

    fn open(&self, number: u64, options: &mut OpenOptions) -> File {
        options.open(self.mounted.path(format!("device/{number}"))).unwrap()
    }

    /// Opens a file to read and write.
    fn file(&self, number: u64) -> File {
        self.open(number, OpenOptions::new().read(true).write(true))
    }

    /// Unmounts. Returns `true` if all was written, and what the program said.
    fn unmount(self) -> (bool, String) {
        let (status, log) = self.mounted.unmount();
        self.session.umount_and_join().unwrap();
        assert!(status.success() || status.code() == Some(1), "{status}: {log}");
        (status.success(), log)
    }
}

/// Waits until a condition holds; fails after a minute.
#[track_caller]
fn until(mut condition: impl FnMut() -> bool) {
    let is_so = (0..6_000).any(|_| {
        let is_so = condition();
        thread::sleep(Duration::from_millis(if is_so { 0 } else { 10 }));
        is_so
    });
    assert!(is_so, "after a minute");
}

fn number(result: io::Result<()>) -> Option<i32> {
    result.err().map(|error| error.raw_os_error().unwrap())
}

/// Closes a file. Returns the error, which a drop ignores.
fn close(file: File) -> Option<i32> {
    let closed = nix::unistd::close(file);
    closed.err().map(|error| error as i32)
}

#[test]
fn each_open_handle_learns_of_a_passing_error_once() {
    let Some(test) = WithDevice::new() else { return };
    for (writes, flushes) in [(Some(libc::EIO), None), (None, Some(libc::EIO))] {
        let (one, two) = (test.file(0), test.file(0));
        one.write_all_at(&[1; 10_000], 0).unwrap();
        test.device.refuse(writes, flushes);
        assert_eq!(number(one.sync_all()), Some(libc::EIO));
        test.device.recover();
        let late = test.file(0);
        assert_eq!(number(late.sync_all()), None, "of an error before it was opened");
        assert_eq!(number(two.sync_all()), Some(libc::EIO));
        for file in [&one, &two, &late] {
            assert_eq!(number(file.sync_all()), None, "again");
        }
        drop((one, two, late));

        // And the file can be written anew, with nothing left of the error.
        let again = test.open(0, OpenOptions::new().write(true).truncate(true));
        again.write_all_at(&[2; 20_000], 0).unwrap();
        assert_eq!(number(again.sync_all()), None);
        assert_eq!(test.device.contents(0), [2; 20_000]);
        assert_eq!(close(again), None);
    }
    let (is_written, log) = test.unmount();
    assert!(is_written && log.contains("device/0"), "{log}");
}

#[test]
fn pages_that_a_device_refused_are_written_when_it_recovers() {
    let Some(test) = WithDevice::new() else { return };
    let file = test.file(0);
    file.write_all_at(&[3; 10_000], 0).unwrap();
    test.device.refuse(Some(libc::EIO), None);
    assert_eq!(number(file.sync_all()), Some(libc::EIO));
    assert_eq!(number(file.sync_all()), Some(libc::EIO), "still");
    test.device.recover();
    assert_eq!(number(file.sync_all()), None);
    assert_eq!(test.device.contents(0), [3; 10_000]);
    drop(file);
    assert!(test.unmount().0);
}

#[test]
fn a_close_reports_what_was_refused_before_and_leaves_it_for_a_sync() {
    let Some(test) = WithDevice::new() else { return };
    let file = test.file(0);
    let copy = file.try_clone().unwrap();
    test.device.refuse(Some(libc::ENOSPC), None);
    file.write_all_at(&[4; 10_000], 0).unwrap();
    // By age.
    test.device.wait_until_refused();
    until(|| close(copy.try_clone().unwrap()).is_some());
    assert_eq!(close(copy), Some(libc::ENOSPC));
    test.device.recover();
    let _written = file.sync_all();
    assert_eq!(number(file.sync_all()), None);
    assert_eq!(close(file), None);
    assert_eq!(test.device.contents(0), [4; 10_000]);
    let (is_written, log) = test.unmount();
    assert!(is_written && log.contains("device/0"), "{log}");
}

#[test]
fn a_rename_and_an_unmount_report_what_cannot_be_written() {
    let Some(test) = WithDevice::new() else { return };
    let file = test.file(0);
    file.write_all_at(&[5; 10_000], 0).unwrap();
    test.device.refuse(Some(libc::EIO), None);
    let (from, to) = (test.mounted.path("device/0"), test.mounted.path("device/1"));
    assert_eq!(number(fs::rename(from, to)), Some(libc::EIO));
    drop(file);
    let (is_written, log) = test.unmount();
    let named = log.lines().find(|line| line.contains("not written")).unwrap_or_default();
    assert!(!is_written && named.contains("device/0"), "{log}");
}

#[test]
fn an_open_after_a_failed_flush_begins_with_what_the_storage_has() {
    let Some(test) = WithDevice::new() else { return };
    let file = test.file(0);
    file.write_all_at(&[6; 10_000], 0).unwrap();
    test.device.refuse(None, Some(libc::EIO));
    assert_eq!(number(file.sync_all()), Some(libc::EIO));
    test.device.recover();
    // As if the device had lost it.
    test.device.files.lock().unwrap().insert(2, vec![0; 10_000]);
    assert_eq!(close(file), None);
    let mut bytes = Vec::new();
    // The kernel releases a handle some time after its close.
    until(|| {
        bytes.clear();
        test.file(0).read_to_end(&mut bytes).unwrap();
        bytes[0] == 0
    });
    assert_eq!(bytes, [0; 10_000]);
    assert!(test.unmount().0);
}
