//! A device that hangs, in the middle of the source directory: a file system of this test, which
//! answers no read until it is told to.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyEntry, Request,
};

use crate::mounted::{Mounted, can_mount};

const VALID: Duration = Duration::from_secs(60);
const FILE: INodeNo = INodeNo(2);
const FILE_BYTES: u64 = 1 << 20;

/// A directory with one file, whose reads wait here for their answers.
#[derive(Default)]
struct Hanging {
    waiting: Mutex<Vec<(ReplyData, u32)>>,
    read_arrived: Condvar,
}

impl Hanging {
    fn wait_for_a_read(&self) {
        let waiting = self.waiting.lock().unwrap();
        drop(self.read_arrived.wait_while(waiting, |waiting| waiting.is_empty()).unwrap());
    }

    fn answer(&self) {
        let waiting = std::mem::take(&mut *self.waiting.lock().unwrap());
        waiting.into_iter().for_each(|(reply, size)| reply.data(&vec![9; size as usize]));
    }
}

fn attributes(ino: INodeNo) -> FileAttr {
    let time = SystemTime::UNIX_EPOCH;
    let is_root = ino == INodeNo::ROOT;
    FileAttr {
        ino,
        size: FILE_BYTES,
        blocks: FILE_BYTES / 512,
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

struct HangingServer(Arc<Hanging>);

impl Filesystem for HangingServer {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == "hung" {
            reply.entry(&VALID, &attributes(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&VALID, &attributes(number));
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.0.waiting.lock().unwrap().push((reply, size));
        self.0.read_arrived.notify_all();
    }
}

#[test]
fn a_device_that_hangs_stops_only_its_own_files() {
    if !can_mount() {
        return;
    }
    let source = tempfile::tempdir().unwrap();
    let slow = source.path().join("slow");
    fs::create_dir(&slow).unwrap();
    let hanging = Arc::new(Hanging::default());
    let server = HangingServer(Arc::clone(&hanging));
    let session = fuser::spawn_mount(server, &slow, &fuser::Config::default()).unwrap();
    let mounted = Mounted::of(source.path(), &["--threads", "2", "--memory", "8M"]).unwrap();

    let readers: Vec<_> = (0..8)
        .map(|index| {
            let path = mounted.path("slow/hung");
            thread::spawn(move || {
                let file = File::open(path).unwrap();
                let mut byte = [0];
                file.read_exact_at(&mut byte, index * 65_536).unwrap();
                byte[0]
            })
        })
        .collect();
    hanging.wait_for_a_read();
    // All of this hangs, and the test with it, if a request for the file above is in the way.
    for number in 0..20 {
        let path = mounted.path(format!("file{number}"));
        fs::write(&path, vec![number; 100_000]).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        assert_eq!(fs::read(&path).unwrap(), vec![number; 100_000]);
        fs::rename(&path, mounted.path("renamed")).unwrap();
    }
    assert_eq!(fs::read_dir(mounted.path("")).unwrap().count(), 2);
    while readers.iter().any(|reader| !reader.is_finished()) {
        hanging.answer();
        thread::yield_now();
    }
    for reader in readers {
        assert_eq!(reader.join().unwrap(), 9);
    }
    mounted.unmount_cleanly();
    session.umount_and_join().unwrap();
}
