//! A file system that refuses direct transfers only when io_uring makes them: they are repeated
//! through the page cache, like all later ones, still by io_uring, without an error for the caller.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::support::{PAGE, assert_same, directory, file_of, has, read_all, writable};
use bifolio::backing::{
    Alignment, Backing, DirectBacking, DirectStatus, DiskFile, FileIdentity, IoBuf, IoBufMut,
    IoRequest, Operation, Submission,
};
use bifolio::{Cache, Feature, OpenOptions, ReadRequest};
use bifolio_testing::{Call, Fault, FaultyBacking, fill_bytes, skip};
use tempfile::TempDir;

const LENGTH: usize = 200 * PAGE as usize + 777;

/// A file whose direct transfers of one kind are refused from the `refused_from`-th result on.
struct Refusing {
    disk: DiskFile,
    operation: Operation,
    refused_from: u64,
    answers: AtomicU64,
}

impl fmt::Debug for Refusing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Refusing")
    }
}

impl Backing for Refusing {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.disk.read_at(target, position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        self.disk.write_at(source, position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.disk.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.disk.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.disk.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        self.disk.describe()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for Refusing {
    fn read_vectored_at(&self, targets: &mut [IoBufMut<'_>], at: u64) -> io::Result<usize> {
        self.disk.read_vectored_at(targets, at)
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], at: u64) -> io::Result<usize> {
        self.disk.write_vectored_at(sources, at)
    }

    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        self.disk.submission(request)
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        let is_due = request.operation == self.operation
            && self.answers.fetch_add(1, Ordering::Relaxed) + 1 >= self.refused_from;
        if is_due && self.disk.direct() == DirectStatus::Direct {
            return self.disk.completed(request, Err(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        self.disk.completed(request, answer)
    }

    fn sync_all(&self) -> io::Result<()> {
        self.disk.sync_all()
    }

    fn alignment(&self) -> Alignment {
        self.disk.alignment()
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.disk.identity()
    }

    fn direct(&self) -> DirectStatus {
        self.disk.direct()
    }
}

struct World {
    _directory: TempDir,
    path: PathBuf,
    bytes: Vec<u8>,
    backing: Arc<FaultyBacking>,
    cache: Cache,
}

/// Creates the world; `None`, with a message, where transfers are not direct or submissions are
/// refused.
fn world(operation: Operation, refused_from: u64) -> Option<World> {
    let directory = directory();
    let bytes = fill_bytes(1, LENGTH);
    let path = file_of(&directory, "file", &bytes);
    let options = OpenOptions::new().write(true);
    let disk = DiskFile::open(&path, &options).unwrap();
    if disk.direct() != DirectStatus::Direct {
        skip(Feature::DirectIo, path.display());
        return None;
    }
    if !has(Feature::IoUring) {
        return None;
    }
    let refusing = Refusing { disk, operation, refused_from, answers: AtomicU64::new(0) };
    let backing = Arc::new(FaultyBacking::new(refusing));
    let builder = Cache::builder().memory(4 << 20).readahead_max(0);
    let cache = builder.dirty_age_max(Duration::from_millis(3_600_000)).build().unwrap();
    Some(World { _directory: directory, path, bytes, backing, cache })
}

impl World {
    /// Checks that it was refused, and that the statistics list the fallback.
    #[track_caller]
    fn assert_fallen_back(&self) {
        let fallbacks = self.cache.stats().fallbacks;
        let name = self.path.display().to_string();
        let says_so = |line: &String| line.contains(&name) && line.contains("refused a direct");
        assert!(fallbacks.iter().any(says_so), "{fallbacks:?}");
    }
}

#[test]
fn reads_that_are_refused_come_by_the_page_cache() {
    for refused_from in [1, 2, 7] {
        let Some(world) = world(Operation::Read, refused_from) else { return };
        let file = world.cache.open_backing(world.backing.clone(), &writable()).unwrap();
        // Every other page, the last one among them, which is not whole.
        for first in [0, 1] {
            let mut buffers = vec![vec![0; PAGE as usize]; 101 - first as usize];
            let positions = (first * PAGE..).step_by(2 * PAGE as usize);
            let mut requests: Vec<_> = positions
                .zip(&mut buffers)
                .map(|(position, buffer)| ReadRequest::new(buffer, position))
                .collect();
            file.read_many(&mut requests).unwrap();
            for request in requests {
                let count = *request.result.as_ref().unwrap();
                let start = request.position as usize;
                assert_eq!(count, (LENGTH - start).min(PAGE as usize));
                assert_same(&request.buffer[..count], &world.bytes[start..start + count]);
            }
        }
        world.assert_fallen_back();
        assert_eq!(world.cache.stats().reads.misses, 201);
        assert!(world.backing.submitted() > 150, "it gave up io_uring, and not only O_DIRECT");
    }
}

#[test]
fn refused_writes_are_buffered_and_bad_places_stay_dirty() {
    for refused_from in [1, 3] {
        let Some(world) = world(Operation::Write, refused_from) else { return };
        let file = world.cache.open_backing(world.backing.clone(), &writable()).unwrap();
        let mut expected = world.bytes.clone();
        let bad = 60 * PAGE;
        world.backing.inject(Fault::on(Call::Write).at(bad..bad + 1).times(1).fails(libc::EIO));
        for round in 0..3_u8 {
            // Every third page, and the last one grows by some bytes.
            for start in (0..LENGTH).step_by(3 * PAGE as usize) {
                let end = (start + PAGE as usize).min(LENGTH);
                expected[start..end].fill(round + start as u8);
                file.write_all_at(&expected[start..end], start as u64).unwrap();
            }
            let end = expected.len();
            expected.extend([round; 100]);
            file.write_all_at(&[round; 100], end as u64).unwrap();
            if round == 0 {
                file.sync_data().unwrap_err();
                assert_eq!(world.cache.stats().memory.dirty_bytes, PAGE);
            }
            file.sync_data().unwrap();
            assert_same(&std::fs::read(&world.path).unwrap(), &expected);
            assert_same(&read_all(&file), &expected);
        }
        world.assert_fallen_back();
        assert!(world.backing.submitted() > 150, "it gave up io_uring, and not only O_DIRECT");
    }
}
