//! Exact re-ranking: the best 10 of 4,096 candidates by inner product, for 100 queries over vectors
//! in a file eight times as large as the memory, by `read_many`, by `pin_many_into` and by mmap.
//!
//! `cargo run --release --example rerank -p bifolio -- [MEMORY_MIB]`
//!
//! An approximate index names candidates, a file has their exact vectors: each query is one gather
//! of vectors. The candidates are random here, and each query begins with nothing of the file in
//! memory.
//!
//! # Safety
//! No other program changes the file while it is mapped, and this one does not either.
#![allow(unsafe_code)]

use std::error::Error;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{io, ptr, slice};

use bifolio::{Cache, ImmutableFile, OpenOptions, PageRef, ReadRequest};

const DIMENSIONS: usize = 256;
const ROW_BYTES: usize = DIMENSIONS * size_of::<f32>();
const QUERIES: usize = 100;
const CANDIDATES: usize = 4096;
const BEST: usize = 10;
/// Vectors of a call of `read_many`: their copies stay in the processor's cache.
const CALL_ROWS: usize = 1024;

type Result<T> = std::result::Result<T, Box<dyn Error>>;
/// Scores and vector numbers, best first.
type Ranking = Vec<(f32, u64)>;

fn main() -> Result<()> {
    let argument = std::env::args().nth(1);
    let memory_mib: u64 = argument.map_or(Ok(32), |text| text.parse())?;
    let count = (memory_mib << 20) * 8 / ROW_BYTES as u64;
    let directory = tempfile::tempdir_in(".")?;
    let path = directory.path().join("matrix");
    write_matrix(&path, count)?;
    let queries: Vec<Query> = (0..QUERIES as u64).map(|seed| Query::new(seed, count)).collect();
    println!("{count} vectors of {DIMENSIONS} f32, {memory_mib} MiB of memory, per query:");

    let cache = Cache::builder().memory(memory_mib << 20).build()?;
    let file = cache.open_immutable(&path, &OpenOptions::new())?;
    let mut buffer = vec![0; CALL_ROWS * ROW_BYTES];
    let forget = || file.evict(0..file.len()).map(drop);
    let by_read = measure("read_many", &queries, |query| {
        forget()?;
        timed(|| read_many(&file, &mut buffer, query))
    })?;
    let mut vectors = Vec::new();
    let by_pin = measure("pin_many_into", &queries, |query| {
        vectors.clear();
        forget()?;
        timed(|| pin_many(&file, &mut vectors, query))
    })?;
    let by_map = measure("mmap, MADV_RANDOM", &queries, |query| {
        let map = KernelMap::new(&path)?;
        timed(|| Ok(map.rank(query, false)))
    })?;
    let by_advice = measure("mmap, MADV_WILLNEED", &queries, |query| {
        let map = KernelMap::new(&path)?;
        timed(|| Ok(map.rank(query, true)))
    })?;
    assert!(by_read == by_pin && by_read == by_map && by_read == by_advice);
    Ok(())
}

fn measure(
    name: &str,
    queries: &[Query],
    mut rank: impl FnMut(&Query) -> Result<(Ranking, Duration)>,
) -> Result<Vec<Ranking>> {
    let mut durations = Vec::new();
    let mut rankings = Vec::new();
    for query in queries {
        let (ranking, duration) = rank(query)?;
        rankings.push(ranking);
        durations.push(duration);
    }
    durations.sort_unstable();
    let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
    let (median, slowest) = (durations[QUERIES / 2], durations[QUERIES - 1]);
    println!("{name:>20} {:8.2} ms, at most {:8.2}", milliseconds(median), milliseconds(slowest));
    Ok(rankings)
}

fn timed(rank: impl FnOnce() -> Result<Ranking>) -> Result<(Ranking, Duration)> {
    let begin = Instant::now();
    Ok((rank()?, begin.elapsed()))
}

/// Copies the vectors of the candidates, many with a call.
fn read_many(file: &bifolio::File, buffer: &mut [u8], query: &Query) -> Result<Ranking> {
    let mut best = Best::default();
    for candidates in query.candidates.chunks(CALL_ROWS) {
        let rows = buffer.chunks_exact_mut(ROW_BYTES).zip(candidates);
        let request = |(buffer, row): (_, &u64)| ReadRequest::new(buffer, row * ROW_BYTES as u64);
        let mut requests: Vec<ReadRequest<'_>> = rows.map(request).collect();
        file.read_many(&mut requests)?;
        for (request, row) in requests.into_iter().zip(candidates) {
            request.result?;
            best.add(query.score(request.buffer), *row);
        }
    }
    Ok(best.0)
}

/// Reads the vectors of all candidates where they are in the cache. `vectors` is a list that all
/// queries use.
fn pin_many<'f>(
    file: &'f ImmutableFile,
    vectors: &mut Vec<bifolio::Result<PageRef<'f, ImmutableFile>>>,
    query: &Query,
) -> Result<Ranking> {
    let range = |row: &u64| row * ROW_BYTES as u64..(row + 1) * ROW_BYTES as u64;
    file.pin_many_into(query.candidates.iter().map(range), vectors);
    let mut best = Best::default();
    for (vector, row) in vectors.iter().zip(&query.candidates) {
        best.add(query.score(vector.as_ref().map_err(Clone::clone)?), *row);
    }
    Ok(best.0)
}

struct Query {
    vector: Vec<f32>,
    candidates: Vec<u64>,
}

impl Query {
    fn new(seed: u64, rows: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let vector = (0..DIMENSIONS).map(|_| random.f32() - 0.5).collect();
        let candidates = (0..CANDIDATES).map(|_| random.u64(..rows)).collect();
        Self { vector, candidates }
    }

    /// Inner product with a vector. Eight sums, so that the compiler can use vector instructions.
    fn score(&self, row: &[u8]) -> f32 {
        let (values, _) = row.as_chunks::<4>();
        let mut sums = [0.0; 8];
        for (left, right) in self.vector.chunks_exact(8).zip(values.chunks_exact(8)) {
            for lane in 0..8 {
                sums[lane] += left[lane] * f32::from_ne_bytes(right[lane]);
            }
        }
        sums.iter().sum()
    }
}

/// The best candidates so far.
#[derive(Default)]
struct Best(Ranking);

impl Best {
    fn add(&mut self, score: f32, row: u64) {
        let place = self.0.partition_point(|better| better.0 >= score);
        if place < BEST {
            self.0.insert(place, (score, row));
            self.0.truncate(BEST);
        }
    }
}

fn write_matrix(path: &Path, rows: u64) -> io::Result<()> {
    let mut random = fastrand::Rng::with_seed(7);
    let mut file = io::BufWriter::with_capacity(1 << 20, File::create(path)?);
    for _ in 0..rows * DIMENSIONS as u64 {
        io::Write::write_all(&mut file, &(random.f32() - 0.5).to_ne_bytes())?;
    }
    file.into_inner()?.sync_all()
}

/// The file mapped by the kernel, none of it in memory.
struct KernelMap {
    start: *mut libc::c_void,
    length: usize,
}

impl KernelMap {
    fn new(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let length = file.metadata()?.len() as usize;
        // SAFETY: the call has no memory arguments.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        let (protection, flags, file) = (libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd());
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, file, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range is the mapping; the advice does not change its bytes.
        unsafe { libc::madvise(start, length, libc::MADV_RANDOM) };
        Ok(Self { start, length })
    }

    fn rank(&self, query: &Query, is_announced: bool) -> Ranking {
        // SAFETY: the mapping has `length` bytes, which do not change.
        let bytes = unsafe { slice::from_raw_parts(self.start.cast::<u8>(), self.length) };
        let row_of = |row: &u64| &bytes[*row as usize * ROW_BYTES..][..ROW_BYTES];
        for row in query.candidates.iter().filter(|_| is_announced) {
            let page = row_of(row).as_ptr().map_addr(|address| address & !4095);
            // SAFETY: the page is in the mapping; the advice does not change its bytes.
            unsafe { libc::madvise(page.cast_mut().cast(), 4096, libc::MADV_WILLNEED) };
        }
        let mut best = Best::default();
        for row in &query.candidates {
            best.add(query.score(row_of(row)), *row);
        }
        best.0
    }
}

impl Drop for KernelMap {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no slice of it exists any more.
        unsafe { libc::munmap(self.start, self.length) };
    }
}
