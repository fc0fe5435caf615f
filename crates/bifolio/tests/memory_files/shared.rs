//! Pages of a memory file that all threads use: each is always one write's, whole, or zeros.
//!
//! Only its owner, one thread, changes a page; all threads read it. Every change has a number, odd
//! for a write, whose bytes encode it, and even for a punched hole. The owner records the begin and
//! the end of a change; so a reader knows which changes it may see.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bifolio::{ErrorKind, File, ReadRequest};
use bifolio_testing::{fill_bytes, with_seeds};
use fastrand::Rng;

use crate::setup::{Setup, check_empty};
use crate::support::PAGE;

const BLOCK: usize = PAGE as usize;
/// Number of shared pages of the file.
const BLOCKS: u64 = 192;
const OWNERS: u64 = 2;
/// Adjacent pages with the same owner: folios of four pages have two owners.
const OWNED_TOGETHER: u64 = 3;

/// Returns the bytes of a write.
fn block(index: u64, change: u64) -> Vec<u8> {
    let mut block = fill_bytes(index ^ change.rotate_left(32), BLOCK);
    block[..8].copy_from_slice(&index.to_le_bytes());
    block[8..16].copy_from_slice(&change.to_le_bytes());
    block
}

/// Known changes of one page.
#[derive(Debug, Default)]
struct Changes {
    /// The newest change that was begun.
    begun: Mutex<u64>,
    /// The newest change that has ended.
    done: Mutex<u64>,
}

/// Memory files shared by several threads, and the state to check them.
struct Arena<'a> {
    file: &'a File,
    pages: Vec<Changes>,
    refused: AtomicU64,
    checked: AtomicU64,
}

impl<'a> Arena<'a> {
    fn new(file: &'a File) -> Self {
        let pages = (0..BLOCKS).map(|_| Changes::default()).collect();
        Self { file, pages, refused: AtomicU64::new(0), checked: AtomicU64::new(0) }
    }

    fn done(&self, index: u64) -> u64 {
        *self.pages[index as usize].done.lock().unwrap()
    }

    fn begun(&self, index: u64) -> u64 {
        *self.pages[index as usize].begun.lock().unwrap()
    }

    /// Begins the next change of each page: odd or even.
    fn begin(&self, pages: std::ops::Range<u64>, parity: u64) -> Vec<u64> {
        pages
            .map(|index| {
                let done = self.done(index);
                let next = if done % 2 == parity { done + 2 } else { done + 1 };
                *self.pages[index as usize].begun.lock().unwrap() = next;
                next
            })
            .collect()
    }

    /// Ends the changes of the first `count` pages; the others were not made.
    fn end(&self, first: u64, changes: &[u64], count: usize) {
        for (number, (index, change)) in (first..).zip(changes).enumerate() {
            let page = &self.pages[index as usize];
            if number < count {
                *page.done.lock().unwrap() = *change;
            } else {
                *page.begun.lock().unwrap() = self.done(index);
            }
        }
    }

    /// Checks a page that was read after `done` and before `begun`.
    fn check(&self, index: u64, found: &[u8], done: u64, begun: u64) {
        self.checked.fetch_add(1, Ordering::Relaxed);
        if found.iter().all(|byte| *byte == 0) {
            let is_zero_change = done.is_multiple_of(2) || begun > done;
            assert!(is_zero_change, "page {index} is zeros; changes {done} to {begun} are not");
            return;
        }
        let number = |at: usize| u64::from_le_bytes(found[at..at + 8].try_into().unwrap());
        let (page, change) = (number(0), number(8));
        assert!(found == block(page, change), "page {index} is a mixture");
        assert_eq!(page, index, "page {index} has the bytes of another");
        let changes = done..=begun;
        assert!(change % 2 == 1 && changes.contains(&change), "{change} is not in {changes:?}");
    }

    /// Returns pages around a random one that the owner has: all adjacent ones, or fewer.
    fn owned(&self, owner: u64, random: &mut Rng) -> std::ops::Range<u64> {
        let stretches = BLOCKS / OWNED_TOGETHER / OWNERS;
        let first = (random.u64(..stretches) * OWNERS + owner) * OWNED_TOGETHER;
        let start = first + random.u64(..OWNED_TOGETHER);
        start..random.u64(start + 1..=first + OWNED_TOGETHER)
    }

    fn change_some(&self, owner: u64, random: &mut Rng) {
        let pages = self.owned(owner, random);
        let bytes = pages.start * PAGE..pages.end * PAGE;
        match random.u32(..10) {
            0..3 => {
                let changes = self.begin(pages.clone(), 0);
                let is_done = self.note_refused(self.file.punch_hole(bytes)).is_some();
                self.end(pages.start, &changes, if is_done { changes.len() } else { 0 });
            }
            3 => {
                // Unspecified.
                let outcome = self.file.allocate(bytes);
                self.note_refused(outcome);
            }
            4..6 => {
                let changes = self.begin(pages.start..pages.start + 1, 1);
                let new = block(pages.start, changes[0]);
                let pin = self.file.pin_mut(bytes.start..bytes.start + PAGE);
                let is_done = self.note_refused(pin.map(|mut pin| {
                    pin.copy_from(BLOCK / 2, &new[BLOCK / 2..]).unwrap();
                    pin.copy_from(0, &new[..BLOCK / 2]).unwrap();
                }));
                self.end(pages.start, &changes, usize::from(is_done.is_some()));
            }
            _ => {
                let changes = self.begin(pages.clone(), 1);
                let blocks = pages.clone().zip(&changes);
                let new: Vec<_> =
                    blocks.flat_map(|(index, change)| block(index, *change)).collect();
                let written = self.file.write_at(&new, bytes.start);
                let written = self.note_refused(written).unwrap_or(0);
                assert!(written.is_multiple_of(BLOCK), "{written} bytes of folios of whole pages");
                self.end(pages.start, &changes, written / BLOCK);
            }
        }
    }

    fn note_refused<T>(&self, outcome: Result<T, bifolio::Error>) -> Option<T> {
        match outcome {
            Ok(answer) => Some(answer),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Full, "{error}");
                self.refused.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    fn read_some(&self, random: &mut Rng) {
        let start = random.u64(..BLOCKS);
        let end = BLOCKS.min(start + random.choice([1, 1, 2, 40]).unwrap());
        let done: Vec<_> = (start..end).map(|index| self.done(index)).collect();
        let mut found = vec![0xEE; (end - start) as usize * BLOCK];
        if random.bool() {
            let read = self.file.read_exact_at(&mut found, start * PAGE);
            if self.note_refused(read).is_none() {
                return;
            }
        } else {
            let pages = found.chunks_mut(BLOCK).zip(start..);
            let mut requests: Vec<_> =
                pages.map(|(page, index)| ReadRequest::new(page, index * PAGE)).collect();
            self.file.read_many(&mut requests).unwrap();
            let results = requests.into_iter().map(|request| request.result);
            let counts: Vec<_> = results.map(|result| self.note_refused(result)).collect();
            if counts.contains(&None) {
                return;
            }
            assert!(counts.into_iter().all(|count| count == Some(BLOCK)));
        }
        for (index, (found, done)) in (start..).zip(found.chunks(BLOCK).zip(done)) {
            self.check(index, found, done, self.begun(index));
        }
    }

    /// Checks that bytes skipped by a seek were not data, or not a hole, all the time.
    fn seek_some(&self, random: &mut Rng) {
        let index = random.u64(..BLOCKS);
        let done = self.done(index);
        let found = self.file.seek_data(index * PAGE).unwrap();
        let is_data = done % 2 == 1 && self.begun(index) == done;
        assert!(!is_data || found == Some(index * PAGE), "{found:?} passes page {index}");
        let done = self.done(index);
        let found = self.file.seek_hole(index * PAGE).unwrap();
        let is_data = done % 2 == 1 && self.begun(index) == done;
        assert!(!is_data || found > Some(index * PAGE), "page {index} is no hole");
    }
}

/// Extends and truncates the file after the pages all the time.
fn cut_and_grow(arena: &Arena<'_>, stop: &AtomicBool, random: &mut Rng) {
    let mut fill = 0_u8;
    while !stop.load(Ordering::Relaxed) {
        fill = fill % 250 + 1;
        let outcome = cut_and_grow_once(arena.file, fill, random);
        arena.note_refused(outcome);
    }
}

fn cut_and_grow_once(file: &File, fill: u8, random: &mut Rng) -> Result<(), bifolio::Error> {
    let (start, most) = (BLOCKS * PAGE, 20 * PAGE);
    file.set_len(start)?;
    let written = file.write_at(&vec![fill; random.usize(1..most as usize)], start)? as u64;
    assert_eq!(file.len(), start + written);
    let kept = random.u64(1..=written);
    file.set_len(start + kept)?;
    file.set_len(start + most)?;
    let mut found = vec![0xEE; most as usize];
    file.read_exact_at(&mut found, start)?;
    let (front, back) = found.split_at(kept as usize);
    assert!(front.iter().all(|byte| *byte == fill), "bytes before the cut are lost");
    assert!(back.iter().all(|byte| *byte == 0), "bytes behind the cut are back");
    Ok(())
}

/// Returns how many operations were refused for lack of memory.
fn pages_are_whole(setup: &Setup, seed: u64, time: Duration) -> u64 {
    let cache = setup.cache();
    let file = setup.file(&cache);
    file.set_len(BLOCKS * PAGE).unwrap();
    let arena = Arena::new(&file);
    let stop = AtomicBool::new(false);
    let until = Instant::now() + time;
    thread::scope(|scope| {
        let (arena, stop) = (&arena, &stop);
        let with_random = |number: u64, step: fn(&Arena<'_>, u64, &mut Rng)| {
            scope.spawn(move || {
                let mut random = Rng::with_seed(seed ^ number << 8);
                while !stop.load(Ordering::Relaxed) && Instant::now() < until {
                    step(arena, number, &mut random);
                }
            })
        };
        let mut threads = Vec::new();
        for owner in 0..OWNERS {
            threads.push(with_random(owner, |arena, owner, random| {
                arena.change_some(owner, random);
            }));
        }
        threads.push(with_random(OWNERS, |arena, _, random| arena.read_some(random)));
        threads.push(with_random(OWNERS + 1, |arena, _, random| {
            arena.read_some(random);
            arena.seek_some(random);
        }));
        if !setup.keeps_in_memory() {
            let (cache, memory_bytes) = (&cache, setup.memory_bytes);
            scope.spawn(move || {
                let mut random = Rng::with_seed(!seed);
                while !stop.load(Ordering::Relaxed) {
                    let bytes = random.u64(memory_bytes / 8 * 7..=memory_bytes);
                    if let Err(error) = cache.set_memory(bytes) {
                        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
                    }
                    thread::sleep(Duration::from_millis(5));
                }
            });
        }
        let cutter = scope.spawn(move || cut_and_grow(arena, stop, &mut Rng::with_seed(seed)));
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        stop.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
        cutter.join().unwrap();
    });
    // In the end each page is what its last change made of it.
    for index in 0..BLOCKS {
        let mut found = vec![0xEE; BLOCK];
        file.read_exact_at(&mut found, index * PAGE).unwrap();
        arena.check(index, &found, arena.done(index), arena.done(index));
    }
    let checked = arena.checked.load(Ordering::Relaxed);
    assert!(checked > 200, "only {checked} pages were read");
    let refused = arena.refused.load(Ordering::Relaxed);
    let swapped = cache.stats().storage.swapped_out_pages;
    assert_eq!(swapped > 0, !setup.keeps_in_memory(), "{swapped} pages were swapped");
    file.set_len(0).unwrap();
    check_empty(&cache, setup, setup.folio_bytes).unwrap();
    refused
}

#[test]
fn a_page_that_was_swapped_is_one_writes_whole_or_zeros() {
    for folio_bytes in [4 << 10, 16 << 10, 64 << 10] {
        let setup = Setup::swapping((256 << 10) + 10 * folio_bytes, folio_bytes);
        with_seeds(1, |seed| {
            pages_are_whole(&setup, seed, Duration::from_millis(700));
        });
    }
}

#[test]
fn a_page_read_is_one_writes_whole_or_zeros() {
    for folio_bytes in [4 << 10, 16 << 10, 64 << 10] {
        let setup = Setup::new(16 << 20, folio_bytes);
        with_seeds(1, |seed| {
            let refused = pages_are_whole(&setup, seed, Duration::from_millis(700));
            assert_eq!(refused, 0, "there was room");
        });
    }
}

#[test]
fn a_page_whose_write_was_refused_is_what_it_was() {
    for folio_bytes in [4 << 10, 16 << 10] {
        let setup = Setup::new(400 << 10, folio_bytes);
        with_seeds(1, |seed| {
            let refused = pages_are_whole(&setup, seed, Duration::from_millis(700));
            assert!(refused > 0, "nothing was refused");
        });
    }
}

/// Checks that appended bytes stay while older bytes are punched.
fn append_against_punches(setup: &Setup, seed: u64) {
    const END: u64 = 600_000;
    let cache = setup.cache();
    let file = setup.file(&cache);
    let punched = Mutex::new(0_u64);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let end = file.len();
                *punched.lock().unwrap() = end;
                file.punch_hole(end.saturating_sub(9000)..end).unwrap();
            }
        });
        let mut random = Rng::with_seed(seed);
        let mut end = 0;
        let mut lost = None;
        while end < END {
            let bytes = vec![7; random.usize(1..100)];
            file.write_all_at(&bytes, end).unwrap();
            let mut found = vec![0xEE; bytes.len()];
            file.read_exact_at(&mut found, end).unwrap();
            let kept = punched.lock().unwrap().saturating_sub(end).min(found.len() as u64);
            if found[kept as usize..].iter().any(|byte| *byte != 7) {
                lost = Some(end);
                break;
            }
            end += bytes.len() as u64;
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(lost, None, "appended, and punched");
    });
}

#[test]
fn a_punch_up_to_the_end_spares_what_is_appended() {
    with_seeds(3, |seed| {
        append_against_punches(&Setup::new(4 << 20, 4096), seed);
        append_against_punches(&Setup::new(4 << 20, 64 << 10), seed);
    });
}
