//! Faults of transfers that the cache submits itself, by io_uring, over a real file.

use std::sync::Arc;
use std::thread;

use bifolio::backing::DiskFile;
use bifolio::{Cache, Feature, File, OpenOptions, ReadRequest};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, fill_bytes, skip};
use tempfile::TempDir;

const PAGE: usize = 4096;
/// Requests of one call, each of a page far from the others.
const REQUESTS: usize = 16;
const STRIDE: usize = 8 * PAGE;

struct World {
    _directory: TempDir,
    bytes: Vec<u8>,
    backing: Arc<FaultyBacking>,
    file: File,
    _cache: Cache,
}

/// Creates the world; `None`, with a message, where the kernel refuses submissions.
fn world() -> Option<World> {
    let mut features = bifolio::features().into_iter();
    if !features.any(|found| found.feature == Feature::IoUring && found.in_use) {
        skip(Feature::IoUring, "every test submits its transfers");
        return None;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("file");
    let bytes = fill_bytes(1, REQUESTS * STRIDE);
    std::fs::write(&path, &bytes).unwrap();
    let options = OpenOptions::new().write(true);
    let disk = DiskFile::open(&path, &options).unwrap();
    let backing = Arc::new(FaultyBacking::new(disk));
    let cache = Cache::builder().memory(4 << 20).readahead_max(0).build().unwrap();
    let options = OpenOptions::new().read(true).write(true);
    let file = cache.open_backing(backing.clone(), &options).unwrap();
    Some(World { _directory: directory, bytes, backing, file, _cache: cache })
}

impl World {
    /// Reads a page of each stride at once. Returns for each whether it was read correctly.
    fn read(&self) -> Vec<bool> {
        let mut buffers = vec![[0; PAGE]; REQUESTS];
        let positions = (0..).step_by(STRIDE);
        let mut requests: Vec<_> = positions
            .zip(&mut buffers)
            .map(|(position, buffer)| ReadRequest::new(buffer, position))
            .collect();
        self.file.read_many(&mut requests).unwrap();
        let is_right = |request: &ReadRequest<'_>| {
            let start = request.position as usize;
            let is_read = request.result.as_ref().is_ok_and(|count| *count == PAGE);
            is_read && *request.buffer == self.bytes[start..start + PAGE]
        };
        requests.iter().map(is_right).collect()
    }
}

#[test]
fn each_transfer_counts_once_and_short_ones_are_continued() {
    let Some(world) = world() else { return };
    world.backing.inject(Fault::on(Call::Read).nth(3).short_by(1000));
    world.backing.inject(Fault::on(Call::Read).nth(7).fails(libc::EINTR));
    assert_eq!(world.read(), [true; REQUESTS]);
    let (calls, submitted) = (world.backing.calls(Call::Read), world.backing.submitted());
    assert_eq!((calls, submitted), (REQUESTS as u64 + 2, REQUESTS as u64));
    assert_eq!(world.backing.struck(), 2);
}

#[test]
fn a_bad_place_fails_its_own_request_only() {
    let Some(world) = world() else { return };
    let bad = 5 * STRIDE as u64;
    world.backing.inject(Fault::on(Call::Read).at(bad..bad + 1).forever().fails(libc::EIO));
    let mut expected = [true; REQUESTS];
    expected[5] = false;
    assert_eq!(world.read(), expected);
    assert!(world.backing.submitted() >= REQUESTS as u64);
    world.backing.heal();
    assert_eq!(world.read(), [true; REQUESTS]);
}

#[test]
fn a_held_transfer_holds_its_own_call_only() {
    let Some(world) = world() else { return };
    let gate = Gate::new();
    world.backing.inject(Fault::on(Call::Read).nth(2).held(&gate));
    thread::scope(|scope| {
        let reader = scope.spawn(|| world.read());
        gate.wait_for_arrivals(1);
        let mut page = [0; PAGE];
        world.file.read_exact_at(&mut page, PAGE as u64).unwrap();
        assert_eq!(page, world.bytes[PAGE..2 * PAGE]);
        let is_finished = reader.is_finished();
        gate.open();
        assert_eq!(reader.join().unwrap(), [true; REQUESTS]);
        assert!(!is_finished, "it did not wait for the one that is held");
        assert_eq!(world.backing.submitted(), REQUESTS as u64 - 1);
    });
}
