//! Kills of the program: what `fsync` has acknowledged is in the source directory.

use std::fs::{self, File, OpenOptions};
use std::hint;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use crate::mounted::{Mounted, can_mount};

/// Bytes of a record, and records in the file that is written again and again.
const RECORD_BYTES: usize = 3_000;
const RECORDS: u64 = 50;

fn record(version: u64) -> Vec<u8> {
    version.to_le_bytes().into_iter().cycle().take(RECORD_BYTES).collect()
}

/// Writes until the mount is gone. Each round writes a record and syncs, and creates a file and
/// syncs it and its directory. The number of the last round is in `acknowledged`.
fn write_rounds(path: &Path, acknowledged: &AtomicU64, told: &mpsc::Sender<()>) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let records = options.open(path.join("records"))?;
    // Each write to it is durable when it returns.
    let durable = options.custom_flags(libc::O_DSYNC).open(path.join("durable"))?;
    for round in 1.. {
        let position = (round % RECORDS) * RECORD_BYTES as u64;
        records.write_all_at(&record(round), position)?;
        records.sync_data()?;
        durable.write_all_at(&record(round), position)?;
        let temporary = path.join("temporary");
        let file = File::create(&temporary)?;
        file.write_all_at(&record(round), 0)?;
        file.sync_all()?;
        fs::rename(&temporary, path.join(format!("file{}", round % RECORDS)))?;
        File::open(path)?.sync_all()?;
        // Release: pairs with the Acquire in `kill_once`.
        acknowledged.store(round, Ordering::Release);
        let _ = told.send(());
    }
    Ok(())
}

fn kill_once(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let source = tempfile::tempdir().unwrap();
    let bound = ["512K", "1M", "4M"][random.usize(..3)];
    let mut mounted = Mounted::of(source.path(), &["--memory", bound]).unwrap();
    let acknowledged = Arc::new(AtomicU64::new(0));
    let (tell, told) = mpsc::channel();
    let writer = {
        let (path, acknowledged) = (mounted.path(""), Arc::clone(&acknowledged));
        thread::spawn(move || write_rounds(&path, &acknowledged, &tell))
    };
    for _ in 0..random.u32(1..60) {
        told.recv().unwrap();
    }
    (0..random.u32(..2_000_000)).for_each(|_| hint::spin_loop());
    // The mount stays until the writer has ended: it would go on in the directory below.
    mounted.kill_program();
    let error = writer.join().unwrap().unwrap_err();
    let connection = [libc::ENOTCONN, libc::ECONNABORTED];
    assert!(error.raw_os_error().is_some_and(|number| connection.contains(&number)), "{error}");
    // Acquire: pairs with the Release in `write_rounds`.
    let last = acknowledged.load(Ordering::Acquire);
    let [records, durable] =
        ["records", "durable"].map(|name| fs::read(source.path().join(name)).unwrap());
    for round in last.saturating_sub(RECORDS - 1).max(1)..=last {
        let start = (round % RECORDS) as usize * RECORD_BYTES;
        let found = &records[start..start + RECORD_BYTES];
        let file = fs::read(source.path().join(format!("file{}", round % RECORDS))).unwrap();
        // The round that was killed may be there, in part, instead of the one before.
        let is_next = round + RECORDS == last + 1;
        assert!(found == record(round) || is_next, "seed {seed}: record {round} of {last}");
        let found = &durable[start..start + RECORD_BYTES];
        assert!(found == record(round) || is_next, "seed {seed}: durable {round} of {last}");
        assert!(
            file == record(round) || is_next && file == record(last + 1),
            "seed {seed}: file {round} of {last}"
        );
    }
}

#[test]
fn data_older_than_the_dirty_age_survive_a_kill() {
    if !can_mount() {
        return;
    }
    let contents = |age: &str, look: &dyn Fn(&Path)| {
        let source = tempfile::tempdir().unwrap();
        let path = source.path().join("file");
        let mounted = Mounted::of(source.path(), &["--dirty-age", age]).unwrap();
        // Any close would begin to write it, also that of a copy in a child of this process.
        let mut shell = Command::new("sh");
        shell.args(["-c", "exec > \"$1\"; printf bytes; read line", "sh"]);
        let mut writer = shell.arg(mounted.path("file")).stdin(Stdio::piped()).spawn().unwrap();
        while fs::metadata(mounted.path("file")).map_or(0, |status| status.len()) == 0 {
            thread::sleep(Duration::from_millis(20));
        }
        look(&path);
        mounted.kill();
        drop(writer.stdin.take());
        writer.wait().unwrap();
        fs::read(path).unwrap()
    };
    let wait = |path: &Path| {
        while fs::metadata(path).unwrap().len() == 0 {
            thread::sleep(Duration::from_millis(20));
        }
    };
    assert_eq!(contents("100ms", &wait), b"bytes");
    // Longer than the age is by default.
    assert_eq!(contents("10m", &|_| thread::sleep(Duration::from_secs(3))), b"");
}

#[test]
fn what_fsync_acknowledged_survives_5_kills() {
    if can_mount() {
        (0..5).for_each(kill_once);
    }
}

#[test]
#[ignore = "takes a minute"]
fn what_fsync_acknowledged_survives_100_kills() {
    if can_mount() {
        (100..200).for_each(kill_once);
    }
}
