//! Memory, processor time and descriptors of a mount.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use crate::mounted::Mounted;

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

trait ReadWrite: std::io::Read + std::io::Write {}
impl<C: std::io::Read + std::io::Write> ReadWrite for C {}

#[test]
fn kept_files_are_closed_beyond_their_maximum() {
    let Some(mounted) = Mounted::new(&["--memory", "8M", "--kept-files", "20"]) else { return };
    for number in 0..2_000_u32 {
        fs::write(mounted.path(format!("file{number}")), number.to_le_bytes()).unwrap();
    }
    // Two descriptors of each kept file, one of each inode that the kernel knows.
    let descriptors = fs::read_dir(format!("/proc/{}/fd", mounted.pid())).unwrap().count();
    assert!(descriptors < 2_000 + 2 * 2 * 20 + 100, "{descriptors}");
    for number in 0..2_000_u32 {
        let bytes = fs::read(mounted.path(format!("file{number}"))).unwrap();
        assert_eq!(bytes, number.to_le_bytes());
    }
    mounted.unmount_cleanly();
}

#[test]
fn the_kernel_forgets_inodes_when_descriptors_run_short() {
    if !crate::mounted::can_mount() {
        return;
    }
    let source = tempfile::tempdir().unwrap();
    for number in 0..3_000 {
        File::create(source.path().join(format!("file{number}"))).unwrap();
    }
    let target = tempfile::tempdir().unwrap();
    // Without the right to exceed the hard limit.
    let script = r#"
        program=$1; source=$2; target=$3
        ulimit -n 1000
        setpriv --bounding-set -sys_resource --inh-caps -sys_resource \
            "$program" --background --memory 4M "$source" "$target"
        ls -l "$target" | wc -l
        for turn in 1 2; do
            for file in "$target"/file*; do test -f "$file"; done
        done
        cat "$target"/file* | wc -c
        umount "$target"
        flock "$source" true
    "#;
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_bifolio-mount"));
    let counts = crate::mounted::shell(script, &[program, source.path(), target.path()]);
    assert_eq!(counts.split_whitespace().collect::<Vec<_>>(), ["3001", "0"]);
}
