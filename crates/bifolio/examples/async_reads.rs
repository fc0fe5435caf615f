//! Ten thousand reads at once, by one thread and without a runtime: the futures of a file that is 8
//! times as large as the cache, polled by an executor of three dozen lines. The same reads with
//! `read_many` beside it.

use bifolio::{Access, Cache, File, FileFuture, OpenOptions, ReadRequest};
use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

const CACHE_BYTES: u64 = 32 << 20;
const FILE_BYTES: u64 = 8 * CACHE_BYTES;
const PAGE_BYTES: usize = 4096;
const READS_AT_ONCE: usize = 10_000;
const ROUND: Duration = Duration::from_secs(2);

/// The tasks that were woken.
#[derive(Default)]
struct Woken {
    numbers: Mutex<Vec<usize>>,
    changed: Condvar,
}

/// The waker of a task: it queues the task's number.
struct Task {
    number: usize,
    woken: Arc<Woken>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let mut numbers = self.woken.numbers.lock().expect("no holder panics");
        numbers.push(self.number);
        if numbers.len() == 1 {
            self.woken.changed.notify_one();
        }
    }
}

/// Positions of pages, in no order.
struct Positions(u64);

impl Iterator for Positions {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        Some((self.0 >> 33) % (FILE_BYTES / PAGE_BYTES as u64) * PAGE_BYTES as u64)
    }
}

/// Keeps `READS_AT_ONCE` futures in flight for a round. Returns the number of reads per second.
fn read_async(file: &File, positions: &mut Positions) -> bifolio::Result<f64> {
    let woken = Arc::new(Woken::default());
    let mut start = |buffer| {
        let position = positions.next().expect("without end");
        (position, file.read_async(buffer, position))
    };
    let mut reads: Vec<(u64, FileFuture<Vec<u8>>)> =
        (0..READS_AT_ONCE).map(|_| start(vec![0; PAGE_BYTES])).collect();
    let task = |number| Waker::from(Arc::new(Task { number, woken: Arc::clone(&woken) }));
    let wakers: Vec<Waker> = (0..READS_AT_ONCE).map(task).collect();
    let (begun, mut done) = (Instant::now(), 0);
    let mut ready: Vec<usize> = (0..READS_AT_ONCE).collect();
    while begun.elapsed() < ROUND {
        for number in ready.drain(..) {
            let mut context = Context::from_waker(&wakers[number]);
            while let Poll::Ready(bytes) = Pin::new(&mut reads[number].1).poll(&mut context) {
                let bytes = bytes?;
                assert_eq!(bytes[..8], reads[number].0.to_le_bytes());
                done += 1;
                reads[number] = start(bytes);
            }
        }
        let mut numbers = woken.numbers.lock().expect("no holder panics");
        while numbers.is_empty() {
            numbers = woken.changed.wait(numbers).expect("no holder panics");
        }
        std::mem::swap(&mut *numbers, &mut ready);
    }
    // The reads in flight are dropped here.
    Ok(f64::from(done) / begun.elapsed().as_secs_f64())
}

/// Calls `read_many` for a round. Returns the number of reads per second.
fn read_many(file: &File, positions: &mut Positions) -> bifolio::Result<f64> {
    let mut buffer = vec![0; READS_AT_ONCE * PAGE_BYTES];
    let (begun, mut done) = (Instant::now(), 0.0);
    while begun.elapsed() < ROUND {
        let pages = buffer.chunks_exact_mut(PAGE_BYTES);
        let mut requests: Vec<_> =
            pages.zip(&mut *positions).map(|(page, at)| ReadRequest::new(page, at)).collect();
        file.read_many(&mut requests)?;
        for request in requests {
            request.result?;
            assert_eq!(request.buffer[..8], request.position.to_le_bytes());
        }
        done += READS_AT_ONCE as f64;
    }
    Ok(done / begun.elapsed().as_secs_f64())
}

/// Prints the time of a read of 4 KiB that is in memory, by each of three calls, ns.
fn time_hits(file: &File) -> bifolio::Result<()> {
    const READS: u32 = 1_000_000;
    let mut context = Context::from_waker(Waker::noop());
    let mut buffer = vec![0; PAGE_BYTES];
    file.populate(..64 * PAGE_BYTES as u64)?;
    let at = |number: u32| u64::from(number % 64) * PAGE_BYTES as u64;
    for _ in 0..3 {
        let begun = Instant::now();
        for number in 0..READS {
            file.read_exact_at(&mut buffer, at(number))?;
        }
        let waiting = begun.elapsed() / READS;
        let begun = Instant::now();
        for number in 0..READS {
            let mut read = file.read_async(std::mem::take(&mut buffer), at(number));
            let Poll::Ready(bytes) = Pin::new(&mut read).poll(&mut context) else { continue };
            buffer = bytes?;
        }
        let asynchronous = begun.elapsed() / READS;
        let begun = Instant::now();
        for number in 0..READS {
            let mut pin = file.pin_async(at(number)..at(number) + PAGE_BYTES as u64);
            let Poll::Ready(page) = Pin::new(&mut pin).poll(&mut context) else { continue };
            assert_eq!(page?.u64_le(0), Some(at(number)));
        }
        let pin = begun.elapsed() / READS;
        println!(
            "hit of 4 KiB: read_at {waiting:?}, read_async {asynchronous:?}, pin_async {pin:?}"
        );
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir_in(std::env::current_dir()?)?;
    let path = directory.path().join("data");
    let pages = (0..FILE_BYTES).step_by(PAGE_BYTES);
    let words = pages.flat_map(|at| std::iter::repeat_n(at.to_le_bytes(), PAGE_BYTES / 8));
    std::fs::write(&path, words.flatten().collect::<Vec<u8>>())?;

    let cache = Cache::builder().memory(CACHE_BYTES).build()?;
    let file = cache.open(&path, &OpenOptions::new())?;
    file.set_access(Access::Random);
    let mut positions = Positions(1);
    for _ in 0..3 {
        let asynchronous = read_async(&file, &mut positions)?;
        let many = read_many(&file, &mut positions)?;
        println!("read_async {asynchronous:.0} reads/s, read_many {many:.0} reads/s");
    }
    time_hits(&file)?;
    let stats = cache.stats();
    println!("{} of {} bytes are in use", stats.memory.used_bytes, stats.memory.bound_bytes);
    Ok(())
}
