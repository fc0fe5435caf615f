//! Memory, processor time and descriptors of a mount.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::fs::{Mode, OFlags, fstat, openat};

use crate::mounted::{Mounted, can_mount, have, shell};

/// Memory beside the cache: the program, for each of 4 threads a request of 1 MiB and its answer,
/// and 8 reads of 1 MiB that wait for the device.
pub const CONSTANT_BYTES: u64 = 24 << 20;
/// Memory for writes that wait for a device or for room in the cache.
pub const WAITING_WRITES_BYTES: u64 = 64 << 20;

pub fn status_bytes(pid: u32, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Returns the processor time that a process has used, in ticks of 10 ms.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn resident_memory_stays_within_the_bound() {
    let Some(mounted) = Mounted::new(&["--memory", "64M"]) else { return };
    for name in ["one", "two"] {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        let file = options.open(mounted.path(name)).unwrap();
        (0..128).for_each(|index| file.write_all_at(&[1; 1 << 20], index << 20).unwrap());
        let mut buffer = vec![0; 1 << 20];
        (0..128).for_each(|index| file.read_exact_at(&mut buffer, index << 20).unwrap());
    }
    // Many readers at a time, of which most wait.
    let file = File::open(mounted.path("one")).unwrap();
    thread::scope(|scope| {
        for reader in 0..32 {
            let file = &file;
            scope.spawn(move || {
                let mut buffer = vec![0; 1 << 20];
                for step in 0..16 {
                    let index = (reader * 37 + step * 11) % 128;
                    file.read_exact_at(&mut buffer, index << 20).unwrap();
                    assert!(buffer.iter().all(|byte| *byte == 1));
                }
            });
        }
    });
    drop(file);
    let bound = 64 << 20;
    let most = bound + bound / 50 + (8 << 20) + CONSTANT_BYTES;
    let resident = status_bytes(mounted.pid(), "VmHWM");
    eprintln!(
        "resident {resident} of {most} bytes, {} beyond the bound",
        resident as i64 - bound as i64
    );
    assert!(resident <= most, "{resident} bytes are resident, at most {most} are allowed");
    mounted.unmount_cleanly();
}

#[test]
fn an_idle_mount_uses_no_processor_time() {
    let Some(mounted) = Mounted::new(&["--memory", "16M"]) else { return };
    let mut file = File::create(mounted.path("file")).unwrap();
    file.write_all(&[1; 100_000]).unwrap();
    file.sync_all().unwrap();
    drop(file);
    // Workers leave after 5 s without work, on a loaded machine later; then nothing happens.
    thread::sleep(Duration::from_secs(7));
    let is_idle = (0..5).any(|_| {
        let before = ticks(mounted.pid());
        thread::sleep(Duration::from_secs(3));
        ticks(mounted.pid()) == before
    });
    assert!(is_idle, "the mount used the processor in each of five times 3 s");
    mounted.unmount_cleanly();
}

#[test]
fn statistics_name_the_mount_and_its_files() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let arguments = ["--memory", "8M", "--metrics", &port.to_string()];
    let Some(mounted) = Mounted::new(&arguments) else { return };
    fs::write(mounted.path("table"), [7; 10_000]).unwrap();
    let directory = bifolio_stats::directory();
    let socket = (0..4).map(|number| directory.join(format!("{}-{number}.sock", mounted.pid())));
    let socket = socket.into_iter().find(|path| path.exists()).unwrap();
    let mut local = std::os::unix::net::UnixStream::connect(socket).unwrap();
    let mut network = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let (mut of_local, mut of_network) = (String::new(), String::new());
    for (client, text) in
        [(&mut local as &mut dyn ReadWrite, &mut of_local), (&mut network, &mut of_network)]
    {
        client.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
        client.read_to_string(text).unwrap();
        let name = format!("bifolio_info{{name=\"{}\"", mounted.path("").display());
        assert!(text.contains(name.trim_end_matches("/\"")), "{text}");
        let file = mounted.source("table").display().to_string();
        assert!(text.contains(&format!("bifolio_file_resident_bytes{{file=\"{file}\"}} 12288")));
    }
    mounted.unmount_cleanly();
}

/// Returns the statistics of a mount.
fn statistics(mounted: &Mounted) -> String {
    let directory = bifolio_stats::directory();
    let paths = (0..4).map(|number| directory.join(format!("{}-{number}.sock", mounted.pid())));
    let socket = paths.into_iter().find(|path| path.exists()).unwrap();
    let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn the_next_mount_reads_the_pages_of_the_last() {
    let (source, lists) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let list = lists.path().join("hot");
    let bytes = bifolio_testing::fill_bytes(1, 1 << 20);
    fs::write(source.path().join("table"), &bytes).unwrap();
    let arguments = ["--memory", "16M", "--hot", list.to_str().unwrap()];
    let Some(mounted) = Mounted::of(source.path(), &arguments) else { return };
    assert!(fs::read(mounted.path("table")).unwrap() == bytes);
    mounted.unmount_cleanly();
    assert!(fs::metadata(&list).unwrap().len() > 20);
    let Some(mounted) = Mounted::of(source.path(), &arguments) else { return };
    let file = File::open(mounted.path("table")).unwrap();
    let name = mounted.source("table").display().to_string();
    let resident = format!("bifolio_file_resident_bytes{{file=\"{name}\"}} {}", 1 << 20);
    let begun = std::time::Instant::now();
    while !statistics(&mounted).contains(&resident) {
        // Opened by its first read at the latest.
        std::os::unix::fs::FileExt::read_at(&file, &mut [0], 0).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(30), "{}", statistics(&mounted));
        thread::sleep(Duration::from_millis(10));
    }
    drop(file);
    mounted.unmount_cleanly();
}

trait ReadWrite: std::io::Read + std::io::Write {}
impl<C: std::io::Read + std::io::Write> ReadWrite for C {}

#[test]
fn kept_files_are_closed_beyond_their_maximum() {
    let Some(mounted) = Mounted::new(&["--memory", "8M", "--kept-files", "20"]) else { return };
    for number in 0..2_000_u32 {
        fs::write(mounted.path(format!("file{number}")), number.to_le_bytes()).unwrap();
    }
    assert!(mounted.descriptors() < 2_000 + 2 * 2 * 20 + 100, "{}", mounted.descriptors());
    for number in 0..2_000_u32 {
        let bytes = fs::read(mounted.path(format!("file{number}"))).unwrap();
        assert_eq!(bytes, number.to_le_bytes());
    }
    mounted.unmount_cleanly();
}

/// Directories and files of [`many_files`].
const DIRECTORIES: usize = 10;
const FILES_PER_DIRECTORY: usize = 500;

/// Creates files below `top`, each with its number as contents.
fn many_files(source: &Path) {
    for directory in 0..DIRECTORIES {
        let path = source.join(format!("top/{directory}"));
        fs::create_dir_all(&path).unwrap();
        for file in 0..FILES_PER_DIRECTORY {
            fs::write(path.join(file.to_string()), contents(directory, file)).unwrap();
        }
    }
}

fn contents(directory: usize, file: usize) -> String {
    format!("{directory}/{file}")
}

/// Has the kernel know all names below a directory.
fn walk(top: &Path) {
    let lines = shell("ls -lR \"$1\" | wc -l", &[top]);
    assert!(lines.trim().parse::<usize>().unwrap() > DIRECTORIES * FILES_PER_DIRECTORY);
}

#[test]
fn names_that_the_kernel_remembers_leave_descriptors_to_open_files() {
    let source = tempfile::tempdir().unwrap();
    many_files(source.path());
    let Some(mounted) = Mounted::limited(source.path(), 1024, &["--memory", "16M"]) else { return };
    let top = mounted.path("top");
    walk(&top);
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let open = |number: usize| {
        let (directory, file) = (number % DIRECTORIES, number / DIRECTORIES);
        (options.open(top.join(contents(directory, file))).unwrap(), contents(directory, file))
    };
    let files: Vec<_> = (0..800).map(open).collect();
    walk(&top);
    for (file, contents) in &files {
        let mut bytes = vec![0; contents.len()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, contents.as_bytes());
        file.write_all_at(b" written", contents.len() as u64).unwrap();
    }
    assert!(mounted.descriptors() <= 1024);
    for (file, contents) in files {
        file.sync_data().unwrap();
        let path = mounted.source("top").join(&contents);
        assert_eq!(fs::read_to_string(path).unwrap(), format!("{contents} written"));
    }
    mounted.unmount_cleanly();
}

#[test]
fn an_inode_without_a_descriptor_is_found_after_renames_and_removals() {
    let source = tempfile::tempdir().unwrap();
    many_files(source.path());
    let Some(mounted) = Mounted::limited(source.path(), 256, &["--memory", "16M"]) else { return };
    let (top, moved) = (mounted.path("top"), mounted.path("moved"));
    // What a program names by descriptors, which need not be open in the mount.
    let name = |path: &Path| {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).unwrap()
    };
    let directory = name(&top.join("3"));
    let [removed, linked, replaced, renamed] =
        ["3/1", "3/2", "3/3", "3/4"].map(|path| name(&top.join(path)));
    let other = top.join("3/link");
    fs::hard_link(top.join("3/2"), &other).unwrap();
    let inodes = [&removed, &linked, &replaced, &renamed].map(|file| fstat(file).unwrap().st_ino);
    walk(&top);
    assert!(mounted.descriptors() < 256);
    fs::remove_file(top.join("3/1")).unwrap();
    fs::remove_file(top.join("3/2")).unwrap();
    fs::rename(top.join("4/3"), top.join("3/3")).unwrap();
    fs::rename(top.join("3/4"), top.join("5/renamed")).unwrap();
    fs::rename(&top, &moved).unwrap();
    walk(&moved);
    let found = [&removed, &linked, &replaced, &renamed].map(|file| fstat(file).unwrap());
    assert_eq!(found.map(|stat| stat.st_ino), inodes);
    assert_eq!(found.map(|stat| stat.st_nlink), [0, 1, 0, 1]);
    let read = |name: &str| {
        let file = openat(&directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        std::io::read_to_string(File::from(file.unwrap())).unwrap()
    };
    assert_eq!([read("7"), read("link"), read("3")], ["3/7", "3/2", "4/3"]);
    assert_eq!(fs::read_to_string(moved.join("5/renamed")).unwrap(), "3/4");
    drop((directory, removed, linked, replaced, renamed));
    mounted.unmount_cleanly();
}

#[test]
fn names_that_the_kernel_has_looked_up_stay_within_the_bound() {
    let source = tempfile::tempdir().unwrap();
    for directory in 0..100 {
        let path = source.path().join(directory.to_string());
        fs::create_dir(&path).unwrap();
        (0..1_000).for_each(|file| drop(File::create(path.join(file.to_string())).unwrap()));
    }
    let Some(mounted) = Mounted::of(source.path(), &["--memory", "16M"]) else { return };
    let used = File::open(mounted.path("0/0")).unwrap();
    let inode = fstat(&used).unwrap().st_ino;
    for _ in 0..2 {
        let lines = shell("ls -lR \"$1\" | grep -c ^-", &[&mounted.path("")]);
        assert_eq!(lines, "100000\n");
    }
    let bound = 16 << 20;
    let most = bound + bound / 50 + (8 << 20) + CONSTANT_BYTES;
    let resident = status_bytes(mounted.pid(), "VmHWM");
    eprintln!("resident {resident} of {most} bytes");
    assert!(resident <= most, "{resident} bytes are resident, at most {most} are allowed");
    // What a program uses stays.
    assert_eq!(fstat(&used).unwrap().st_ino, inode);
    drop(used);
    mounted.unmount_cleanly();
}

#[test]
fn a_file_with_another_name_needs_no_descriptor() {
    let source = tempfile::tempdir().unwrap();
    let Some(mounted) = Mounted::limited(source.path(), 256, &["--memory", "16M"]) else { return };
    // As git writes objects.
    for number in 0..1_000 {
        let (temporary, name) = (mounted.path("temporary"), mounted.path(number.to_string()));
        fs::write(&temporary, number.to_string()).unwrap();
        fs::hard_link(&temporary, &name).unwrap();
        fs::remove_file(&temporary).unwrap();
    }
    // By the name that was not used last.
    for number in 0..1_000 {
        let (name, link) = (mounted.path(number.to_string()), mounted.path(format!("{number}-")));
        fs::hard_link(&name, &link).unwrap();
        fs::rename(&link, mounted.path("moved")).unwrap();
        fs::remove_file(mounted.path("moved")).unwrap();
        assert_eq!(fs::read_to_string(&name).unwrap(), number.to_string());
    }
    assert!(mounted.descriptors() < 256, "{}", mounted.descriptors());
    mounted.unmount_cleanly();
}

/// Returns how many bytes of a file are in the kernel's page cache.
fn kernel_bytes(path: &Path) -> u64 {
    let said = shell("fincore --bytes --noheadings --output RES \"$1\"", &[path]);
    said.trim().parse().unwrap()
}

#[test]
fn pages_that_the_kernel_keeps_of_read_files_stay_within_the_bound() {
    if !can_mount() || !have(&["fincore"]) {
        return;
    }
    let source = tempfile::tempdir().unwrap();
    let names = ["one", "two"];
    for name in names {
        fs::write(source.path().join(name), vec![1; 48 << 20]).unwrap();
    }
    let Some(mounted) = Mounted::of(source.path(), &["--memory", "32M"]) else { return };
    let files = names.map(|name| File::open(mounted.path(name)).unwrap());
    let mut page = [0; 4096];
    for position in (0..48 << 20).step_by(8192) {
        for file in &files {
            file.read_exact_at(&mut page, position).unwrap();
            assert!(page == [1; 4096]);
        }
    }
    // The bound, and what was read since it was exceeded.
    let wait = |most: u64| {
        let found = || names.map(|name| kernel_bytes(&mounted.path(name))).iter().sum::<u64>();
        let is_dropped = (0..100).any(|_| {
            thread::sleep(Duration::from_millis(50));
            found() <= most
        });
        assert!(is_dropped, "{} bytes of {most}", found());
    };
    wait(2 << 20);
    // A file that was written counts after its last close.
    let writer = OpenOptions::new().read(true).write(true).open(mounted.path("one")).unwrap();
    let mut bytes = vec![0; 1 << 20];
    for index in 0..48 {
        writer.read_exact_at(&mut bytes, index << 20).unwrap();
        writer.write_all_at(&[2; 4096], index << 20).unwrap();
    }
    assert!(kernel_bytes(&mounted.path("one")) > 4 << 20);
    drop(writer);
    wait(2 << 20);
    for index in 0..48 {
        files[0].read_exact_at(&mut bytes, index << 20).unwrap();
        assert!(bytes[..4096] == [2; 4096] && bytes[4096..].iter().all(|byte| *byte == 1));
    }
    drop(files);
    mounted.unmount_cleanly();
}

/// Returns how many system calls of the server a file costs, but waits of threads and what a debug
/// build adds to each close. `create` gets the number of the file.
fn calls_for_each(mounted: &Mounted, create: impl Fn(u32)) -> u64 {
    const FILES: u32 = 200;
    // The first has threads started and free space looked at.
    (0..FILES).for_each(&create);
    let report = tempfile::NamedTempFile::new().unwrap();
    let mut strace = Command::new("strace");
    strace.args(["-f", "-c", "-e", "trace=!futex,fcntl", "-o"]).arg(report.path());
    strace.args(["-p", &mounted.pid().to_string()]).stderr(Stdio::piped());
    let mut strace = strace.spawn().unwrap();
    let mut said = BufReader::new(strace.stderr.take().unwrap());
    // That all threads are attached.
    said.read_line(&mut String::new()).unwrap();
    (FILES..2 * FILES).for_each(&create);
    // Files are written, and get their times, after they are closed.
    thread::sleep(Duration::from_secs(3));
    kill(Pid::from_raw(strace.id() as i32), Signal::SIGINT).unwrap();
    std::io::copy(&mut said, &mut std::io::sink()).unwrap();
    strace.wait().unwrap();
    let report = fs::read_to_string(report.path()).unwrap();
    eprintln!("{report}");
    let total = report.lines().find(|line| line.ends_with(" total")).unwrap();
    total.split_whitespace().nth(3).unwrap().parse::<u64>().unwrap() / u64::from(FILES)
}

#[test]
fn a_small_file_costs_few_system_calls() {
    if !can_mount() || !have(&["strace"]) {
        return;
    }
    let Some(mounted) = Mounted::new(&["--memory", "64M"]) else { return };
    let create = |number: u32| fs::write(mounted.path(number.to_string()), [7; 4_000]).unwrap();
    let calls = calls_for_each(&mounted, create);
    assert!(calls <= 40, "{calls} system calls for each file");
    mounted.unmount_cleanly();
}
