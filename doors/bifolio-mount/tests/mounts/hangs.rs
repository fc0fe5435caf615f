//! A device that hangs, in the middle of the source directory: a file system of this test, which
//! answers no request of one kind until it is told to.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use fuser::{
    BackgroundSession, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::Pid;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use tempfile::TempDir;

use crate::bounds::{CONSTANT_BYTES, WAITING_WRITES_BYTES, status_bytes};
use crate::mounted::{Mounted, can_mount, run};

const VALID: Duration = Duration::from_secs(60);
const FILE_BYTES: u64 = 1 << 20;

/// Kinds of requests that a device may leave unanswered.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Open,
    Read,
    Write,
    Flush,
}

/// A device with files named `0` to `999`, each full of nines. It forgets what is written.
#[derive(Default)]
struct Device {
    state: Mutex<State>,
    request_hung: Condvar,
}

#[derive(Default)]
struct State {
    hangs: Option<Kind>,
    /// Opens fail.
    fails: bool,
    /// Answers of the requests that hang.
    answers: Vec<Box<dyn FnOnce() + Send>>,
}

impl Device {
    /// Leaves requests of this kind unanswered until [`Self::recover`].
    fn hang(&self, kind: Kind) {
        self.state.lock().unwrap().hangs = Some(kind);
    }

    fn wait_until_a_request_hangs(&self) {
        let state = self.state.lock().unwrap();
        drop(self.request_hung.wait_while(state, |state| state.answers.is_empty()).unwrap());
    }

    /// Answers all requests, those that hang and those to come.
    fn recover(&self) {
        let mut state = self.state.lock().unwrap();
        state.hangs = None;
        let answers = std::mem::take(&mut state.answers);
        drop(state);
        answers.into_iter().for_each(|answer| answer());
    }

    fn answer(&self, kind: Kind, answer: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock().unwrap();
        if state.hangs == Some(kind) {
            state.answers.push(Box::new(answer));
            self.request_hung.notify_all();
        } else {
            drop(state);
            answer();
        }
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

struct DeviceServer(Arc<Device>);

impl Filesystem for DeviceServer {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str().and_then(|name| name.parse::<u64>().ok()) {
            Some(number) if number < 1000 => {
                reply.entry(&VALID, &attributes(INodeNo(2 + number)), Generation(0));
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&VALID, &attributes(number));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        if self.0.state.lock().unwrap().fails {
            return reply.error(Errno::EIO);
        }
        self.0.answer(Kind::Open, || reply.opened(FileHandle(0), FopenFlags::empty()));
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
        self.0.answer(Kind::Read, move || reply.data(&vec![9; size as usize]));
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        bytes: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let length = bytes.len() as u32;
        self.0.answer(Kind::Write, move || reply.written(length));
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u64>,
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
        reply.attr(&VALID, &attributes(number));
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.0.answer(Kind::Flush, || reply.ok());
    }
}

/// Where the kernel counts the requests that wait for an answer, by mount.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// A mount whose directory `slow` is on a device that may hang.
struct WithDevice {
    device: Arc<Device>,
    mounted: Mounted,
    /// Number of the connection of the mount.
    connection: u32,
    session: BackgroundSession,
    _source: TempDir,
}

impl WithDevice {
    #[track_caller]
    fn new(arguments: &[&str]) -> Option<Self> {
        if !can_mount() {
            return None;
        }
        let source = tempfile::tempdir().unwrap();
        let slow = source.path().join("slow");
        fs::create_dir(&slow).unwrap();
        let device = Arc::new(Device::default());
        let server = DeviceServer(Arc::clone(&device));
        let session = fuser::spawn_mount(server, &slow, &fuser::Config::default()).unwrap();
        let arguments = [&["--threads", "2", "--memory", "8M"], arguments].concat();
        let mounted = Mounted::of(source.path(), &arguments).unwrap();
        let connection = rustix::fs::minor(fs::metadata(mounted.path("")).unwrap().dev());
        if !Path::new(CONNECTIONS).join(connection.to_string()).exists() {
            // Only systemd mounts it by itself.
            assert!(run("mount", ["-t", "fusectl", "fusectl", CONNECTIONS]));
        }
        Some(Self { device, mounted, connection, session, _source: source })
    }

    fn slow(&self, number: u64) -> PathBuf {
        self.mounted.path(format!("slow/{number}"))
    }

    /// Does what hangs, and the test with it, if a request for a file of the device is in the way.
    fn use_other_files(&self) {
        for number in 0..20 {
            let path = self.mounted.path(format!("file{number}"));
            fs::write(&path, vec![number; 100_000]).unwrap();
            File::open(&path).unwrap().sync_all().unwrap();
            assert_eq!(fs::read(&path).unwrap(), vec![number; 100_000]);
            fs::rename(&path, self.mounted.path(format!("renamed{number}"))).unwrap();
        }
        assert_eq!(fs::read_dir(self.mounted.path("")).unwrap().count(), 21);
    }

    fn unmount_cleanly(self) {
        self.mounted.unmount_cleanly();
        self.session.umount_and_join().unwrap();
    }
}

fn read_byte(file: &File, position: u64) -> u8 {
    let mut byte = [0];
    file.read_exact_at(&mut byte, position).unwrap();
    byte[0]
}

#[test]
fn a_device_that_hangs_stops_only_its_own_files() {
    let Some(test) = WithDevice::new(&[]) else { return };
    test.device.hang(Kind::Read);
    let readers: Vec<_> = (0..100)
        .map(|index| {
            let path = test.slow(0);
            thread::spawn(move || read_byte(&File::open(path).unwrap(), index * 8192))
        })
        .collect();
    test.device.wait_until_a_request_hangs();
    test.use_other_files();
    test.device.recover();
    for reader in readers {
        assert_eq!(reader.join().unwrap(), 9);
    }
    test.unmount_cleanly();
}

/// A program has the file open already, and goes on to use it.
#[test]
fn an_open_that_hangs_stops_only_its_own_file() {
    for kind in [Kind::Open, Kind::Read] {
        let Some(test) = WithDevice::new(&[]) else { return };
        let path = test.slow(0);
        let file = Arc::new(File::open(&path).unwrap());
        // In flight, a descriptor is closed without a flush.
        let (flight, _end) = UnixStream::pair().unwrap();
        let closed = File::open(&path).unwrap();
        let descriptors = [closed.as_raw_fd()];
        let message = [ControlMessage::ScmRights(&descriptors)];
        let (data, flags) = ([IoSlice::new(&[0])], MsgFlags::empty());
        sendmsg::<()>(flight.as_raw_fd(), &data, &message, flags, None).unwrap();
        drop(closed);

        test.device.hang(kind);
        let mut hung = Vec::new();
        let writable = path.clone();
        hung.push(thread::spawn(move || drop(OpenOptions::new().write(true).open(writable))));
        test.device.wait_until_a_request_hangs();
        drop((flight, _end));
        for index in 0..8 {
            let file = Arc::clone(&file);
            hung.push(thread::spawn(move || assert_eq!(read_byte(&file, index * 65_536), 9)));
        }
        let uses: [fn(PathBuf); 3] = [
            // The device refuses changes.
            |path| drop(fs::set_permissions(path, Permissions::from_mode(0o700))),
            |path| drop(fs::rename(&path, path.with_extension("new"))),
            |path| {
                let sync = AtFlags::STATX_FORCE_SYNC;
                statx(CWD, path, sync, StatxFlags::BASIC_STATS).unwrap();
            },
        ];
        for use_file in uses {
            let path = path.clone();
            hung.push(thread::spawn(move || use_file(path)));
        }
        hung.push(thread::spawn(move || drop(file)));
        test.use_other_files();
        test.device.recover();
        hung.into_iter().for_each(|hung| hung.join().unwrap());
        test.unmount_cleanly();
    }
}

/// The closing of a file may hang, too, long after the program has closed it.
#[test]
fn closes_that_hang_stop_no_close_of_other_files() {
    let Some(test) = WithDevice::new(&["--kept-files", "1"]) else { return };
    // Each takes a thread that closes files; one more, than such threads, remains.
    test.device.hang(Kind::Flush);
    for number in 0..6 {
        assert_eq!(read_byte(&File::open(test.slow(number)).unwrap(), 0), 9);
    }
    test.device.wait_until_a_request_hangs();
    test.use_other_files();
    test.device.recover();
    test.unmount_cleanly();
}

/// Writes 1 MiB to each of these files of the device, in a thread each.
fn start_writers(test: &WithDevice, numbers: Range<u64>) -> Vec<JoinHandle<io::Result<()>>> {
    let open = |number| OpenOptions::new().write(true).open(test.slow(number)).unwrap();
    // All before the first write, which may be in the way of an open.
    let files: Vec<File> = numbers.map(open).collect();
    let write = |file: File| thread::spawn(move || file.write_all_at(&[5; 1 << 20], 0));
    files.into_iter().map(write).collect()
}

/// Waits until each writer has ended or waits for an answer of the mount, which does nothing more.
fn wait_until_all_wait(test: &WithDevice, writers: &[JoinHandle<io::Result<()>>]) {
    let waiting = format!("{CONNECTIONS}/{}/waiting", test.connection);
    let mut before = 0;
    loop {
        let running = writers.iter().filter(|writer| !writer.is_finished()).count();
        let waiting: usize = fs::read_to_string(&waiting).unwrap().trim().parse().unwrap();
        let resident = status_bytes(test.mounted.pid(), "VmRSS");
        if running > 0 && waiting == running && resident == before {
            return;
        }
        before = resident;
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn writes_that_wait_stop_only_their_own_files_and_take_bounded_memory() {
    let Some(test) = WithDevice::new(&[]) else { return };
    test.device.hang(Kind::Write);
    let start = Instant::now();
    let mut writers = start_writers(&test, 0..50);
    wait_until_all_wait(&test, &writers);
    test.use_other_files();
    writers.extend(start_writers(&test, 50..400));
    wait_until_all_wait(&test, &writers);
    test.device.recover();
    let mut refused = 0;
    for writer in writers {
        // A write that has waited for the device as long as the cache lets it is an error.
        if let Err(error) = writer.join().unwrap() {
            let waited = start.elapsed();
            assert!(waited > Duration::from_secs(9), "{error} after {waited:?}");
            assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
            refused += 1;
        }
    }
    let bound = 8 << 20;
    let most = bound + bound / 50 + (8 << 20) + CONSTANT_BYTES + WAITING_WRITES_BYTES;
    let resident = status_bytes(test.mounted.pid(), "VmHWM");
    eprintln!("resident {resident} of {most} bytes");
    assert!(resident <= most, "{resident} bytes are resident, at most {most} are allowed");
    let (status, log) = test.mounted.unmount();
    test.session.umount_and_join().unwrap();
    assert!(status.success() && (refused > 0 || log.is_empty()), "{status}: {log}");
    assert!(log.lines().all(|line| line.contains("cannot be accepted")), "{log}");
}

#[test]
fn a_second_signal_ends_a_mount_whose_threads_all_wait() {
    let Some(test) = WithDevice::new(&[]) else { return };
    test.device.hang(Kind::Write);
    let writers = start_writers(&test, 0..120);
    wait_until_all_wait(&test, &writers);
    let pid = test.mounted.pid();
    // The process cannot end before the device answers, but its main thread can.
    let has_ended = || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit(") ").next().unwrap().starts_with('Z')
    };
    while !has_ended() {
        // Not by a program: it would have copies of the descriptors, and wait to close them.
        kill(Pid::from_raw(pid as i32), Signal::SIGTERM).unwrap();
        thread::sleep(Duration::from_millis(50));
    }
    test.device.recover();
    writers.into_iter().for_each(|writer| drop(writer.join().unwrap()));
    let (status, log) = test.mounted.finish();
    assert!(status.code() == Some(1) && log.contains("perhaps not written"), "{status}: {log}");
    test.session.umount_and_join().unwrap();
}

#[test]
fn an_open_that_fails_in_the_device_names_the_file_in_the_log() {
    let Some(test) = WithDevice::new(&[]) else { return };
    test.device.state.lock().unwrap().fails = true;
    let refused = File::open(test.slow(7)).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EIO));
    test.device.state.lock().unwrap().fails = false;
    let (status, log) = test.mounted.unmount();
    test.session.umount_and_join().unwrap();
    assert!(status.success() && log.contains("/slow/7: cannot open"), "{status}: {log}");
}
