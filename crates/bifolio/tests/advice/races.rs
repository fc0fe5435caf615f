//! Evictions that race with readers, writers, pins and maps: no byte is lost, pins and maps stay
//! valid, and every folio that stays has a reason.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bifolio::{Cache, Evicted, File};
use fastrand::Rng;
use std::ops::Range;

use crate::evict;
use crate::support::{
    PAGE, directory, files_can_be_mapped, open, random_file, wait_for_stats, writable,
};

/// Pages of the file: more than fit into the cache.
const PAGES: u64 = 768;
const MEMORY: u64 = 2 << 20;
const DURATION: Duration = Duration::from_millis(1500);

/// Returns the bytes of a page: its number, and the number of the write.
fn stamp(page: u64, generation: u64) -> u64 {
    page << 32 | generation
}

/// A file whose pages are stamped, and the generations begun and acknowledged.
struct Stamped {
    file: File,
    begun: Vec<AtomicU64>,
    done: Vec<AtomicU64>,
    is_over: AtomicBool,
    evicted: AtomicU64,
}

impl Stamped {
    fn new(file: File) -> Self {
        let numbers = || (0..PAGES).map(|_| AtomicU64::new(0)).collect();
        let (is_over, evicted) = (AtomicBool::new(false), AtomicU64::new(0));
        let stamped = Self { file, begun: numbers(), done: numbers(), is_over, evicted };
        (0..PAGES).for_each(|page| stamped.write(page));
        stamped
    }

    /// Writes the next generation of a page. Each page has one writer.
    fn write(&self, page: u64) {
        // Relaxed: the cache orders it before the bytes are seen.
        let generation = self.begun[page as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let bytes = stamp(page, generation).to_le_bytes().repeat(PAGE as usize / 8);
        self.file.write_all_at(&bytes, page * PAGE).unwrap();
        // Release: pairs with the Acquire in `written`: who sees this sees the bytes.
        self.done[page as usize].store(generation, Ordering::Release);
    }

    /// Returns the minimum generation that the page must have.
    fn written(&self, page: u64) -> u64 {
        // Acquire: pairs with the Release in `write`.
        self.done[page as usize].load(Ordering::Acquire)
    }

    /// Reads a page and checks that it has one generation, which was acknowledged before or begun
    /// since.
    fn check(&self, page: u64) {
        let at_least = self.written(page);
        let mut bytes = [0; PAGE as usize];
        self.file.read_exact_at(&mut bytes, page * PAGE).unwrap();
        self.judge(page, &bytes, at_least);
    }

    fn judge(&self, page: u64, bytes: &[u8], at_least: u64) {
        let at_most = self.begun[page as usize].load(Ordering::Relaxed);
        let words: Vec<_> =
            bytes.as_chunks::<8>().0.iter().copied().map(u64::from_le_bytes).collect();
        let (of, generation) = (words[0] >> 32, words[0] & u64::from(u32::MAX));
        assert!(words.iter().all(|word| *word == words[0]), "page {page} is torn");
        assert_eq!(of, page, "page {page} has bytes of another");
        assert!(
            (at_least..=at_most).contains(&generation),
            "page {page} is of generation {generation}, not {at_least} to {at_most}"
        );
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Writes its own pages, one of `parts`.
    fn run_writer(&self, part: u64, parts: u64) {
        let mut random = Rng::with_seed(part);
        while !self.is_over() {
            self.write(random.u64(..PAGES / parts) * parts + part);
        }
    }

    fn run_reader(&self) {
        let mut random = Rng::with_seed(17);
        while !self.is_over() {
            self.check(random.u64(..PAGES));
        }
    }

    /// Checks that a pinned page stays resident, with its bytes, while it is pinned.
    fn run_pinner(&self) {
        let mut random = Rng::with_seed(18);
        while !self.is_over() {
            let page = random.u64(..PAGES);
            let at_least = self.written(page);
            let pin = self.file.pin(page * PAGE..page * PAGE + 8).unwrap();
            let outcome = self.evict(&(page..page + 1));
            assert_eq!(outcome.folios, 0, "a pinned page");
            // Writers may be at the rest of the page: a word is of one of them.
            let mut word = [0; 8];
            pin.copy_to(0, &mut word).unwrap();
            self.judge(page, &word, at_least);
        }
    }

    fn evict(&self, pages: &Range<u64>) -> Evicted {
        self.file.evict(pages.start * PAGE..pages.end * PAGE).unwrap()
    }

    fn run_evicter(&self, seed: u64) -> Evicted {
        let mut random = Rng::with_seed(seed);
        let mut sum = Evicted::default();
        while !self.is_over() {
            let start = random.u64(..PAGES);
            let pages = start..(start + random.u64(1..64)).min(PAGES);
            let bytes = pages.start * PAGE..pages.end * PAGE;
            match random.u32(..8) {
                0 => self.file.prefetch(bytes).unwrap(),
                1 => self.file.populate(bytes).unwrap(),
                _ => {}
            }
            let outcome = self.evict(&pages);
            let folios = outcome.folios + outcome.kept.total();
            assert!(folios <= pages.end - pages.start, "{folios} of {pages:?}: counted twice");
            self.evicted.fetch_add(outcome.folios, Ordering::Relaxed);
            sum += outcome;
        }
        sum
    }

    /// Runs all threads at once.
    fn race(&self) {
        let sum = thread::scope(|scope| {
            scope.spawn(|| self.run_writer(0, 2));
            scope.spawn(|| self.run_writer(1, 2));
            scope.spawn(|| self.run_reader());
            scope.spawn(|| self.run_pinner());
            let evicters = [31, 32].map(|seed| scope.spawn(move || self.run_evicter(seed)));
            let begun = Instant::now();
            // Longer where the machine is so busy that nothing was evicted.
            let has_evicted = || self.evicted.load(Ordering::Relaxed) > 0;
            let is_over = |elapsed| elapsed > 40 * DURATION || elapsed > DURATION && has_evicted();
            while !is_over(begun.elapsed()) {
                thread::sleep(Duration::from_millis(10));
                let _residency = self.file.residency(0..self.file.len()).unwrap();
            }
            self.is_over.store(true, Ordering::Relaxed);
            let mut sum = Evicted::default();
            evicters.into_iter().for_each(|evicter| sum += evicter.join().unwrap());
            sum
        });
        assert!(sum.folios > 0, "{sum:?}");
        (0..PAGES).for_each(|page| self.check(page));
    }
}

fn builder() -> bifolio::CacheBuilder {
    Cache::builder().memory(MEMORY).dirty_age_max(Duration::from_millis(20))
}

/// Checks that everything written is on the disk after a sync, and can then be evicted.
fn check_disk(cache: &Cache, stamped: &Stamped, path: &std::path::Path) {
    stamped.file.sync_data().unwrap();
    let on_disk = std::fs::read(path).unwrap();
    for (page, bytes) in on_disk.chunks(PAGE as usize).enumerate() {
        stamped.judge(page as u64, bytes, stamped.written(page as u64));
    }
    wait_for_stats(cache, "everything goes", |_| {
        evict(&stamped.file);
        stamped.file.residency(0..stamped.file.len()).unwrap().resident == 0
    });
}

#[test]
fn nothing_is_lost_of_a_file_on_disk() {
    let directory = directory();
    for folio_bytes in [PAGE, 4 * PAGE] {
        let (path, _) = random_file(&directory, "file", (PAGES * PAGE) as usize);
        let cache = builder().build().unwrap();
        let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
        let stamped = Stamped::new(file);
        stamped.race();
        check_disk(&cache, &stamped, &path);
    }
}

#[test]
fn nothing_is_lost_of_a_memory_file() {
    let cache = builder().swap_directory(env!("CARGO_TARGET_TMPDIR")).build().unwrap();
    Stamped::new(cache.memory_file("stamped").unwrap()).race();
}

#[test]
fn nothing_is_lost_of_a_file_that_comes_and_goes_as_maps() {
    if !files_can_be_mapped() {
        return;
    }
    let directory = directory();
    let (path, _) = random_file(&directory, "file", (PAGES * PAGE) as usize);
    let cache = builder().build().unwrap();
    let file = cache.open(&path, &writable().mappable(true)).unwrap();
    let stamped = Stamped::new(file);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Rng::with_seed(19);
            while !stamped.is_over() {
                let start = random.u64(..PAGES - 8);
                let map = stamped.file.map(start * PAGE..(start + 8) * PAGE).unwrap();
                map.populate(0..map.len()).unwrap();
            }
        });
        stamped.race();
    });
    check_disk(&cache, &stamped, &path);
}

#[test]
fn advice_for_all_files_meets_files_that_come_and_go() {
    let directory = directory();
    let paths =
        [0, 1, 2].map(|name| random_file(&directory, &format!("file-{name}"), 64 * PAGE as usize));
    let cache = builder().build().unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                cache.evict_all().unwrap();
            }
        });
        let begun = Instant::now();
        for (path, bytes) in paths.iter().cycle() {
            let file = open(&cache, path);
            crate::support::assert_same(&crate::support::read_all(&file), bytes);
            file.write_all_at(&bytes[..5000], 0).unwrap();
            if begun.elapsed() > DURATION {
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    cache.close().unwrap();
}
