//! Adjacent pages in adjacent frames: counted while frames are free and after churn.
//!
//! The churn is measured, too: a cache whose content has been replaced many times by random reads.
//! The bytes of every read are checked, since folios move meanwhile.

use crate::support::{PAGE, cache_of, directory, writable};
use bifolio::backing::{Backing, IoBuf, IoBufMut};
use bifolio::{Access, Cache, File, OpenOptions};
use bifolio_testing::MemoryBacking;
use fastrand::Rng;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

const MIB: u64 = 1 << 20;

/// Storage in which each page holds its number, whatever is written.
#[derive(Debug)]
struct Numbered {
    len_bytes: u64,
}

impl Backing for Numbered {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        let length = (target.len() as u64).min(self.len_bytes.saturating_sub(position_bytes));
        for offset in (0..length).step_by(PAGE as usize) {
            let page = (position_bytes + offset) / PAGE;
            target.copy_from_slice(offset as usize, &page.to_le_bytes());
        }
        Ok(length as usize)
    }

    fn write_at(&self, source: &IoBuf<'_>, _position_bytes: u64) -> io::Result<usize> {
        Ok(source.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len_bytes)
    }

    fn set_len(&self, _length_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn describe(&self) -> String {
        "numbered pages".to_owned()
    }
}

fn open(cache: &Cache, len_bytes: u64, options: &OpenOptions) -> File {
    cache.open_backing(Arc::new(Numbered { len_bytes }), options).unwrap()
}

/// How a file is filled in order.
#[derive(Clone, Copy, Debug)]
enum Fill {
    Reads(u64),
    Writes(u64),
}

const FILLS: [Fill; 3] = [Fill::Reads(PAGE), Fill::Reads(MIB), Fill::Writes(PAGE)];

/// Fills a new file of `len_bytes` bytes in order.
fn fill(cache: &Cache, len_bytes: u64, folio_bytes: u64, how: Fill) -> File {
    let (Fill::Reads(step) | Fill::Writes(step)) = how;
    let file = open(cache, len_bytes, &writable().folio_bytes(folio_bytes));
    let mut buffer = vec![0; step as usize];
    for position in (0..len_bytes).step_by(step as usize) {
        match how {
            Fill::Reads(_) => file.read_exact_at(&mut buffer, position).unwrap(),
            Fill::Writes(_) => file.write_all_at(&buffer, position).unwrap(),
        }
    }
    file
}

/// Position of the resident pages of a file in memory.
#[derive(Debug, Default)]
struct Placement {
    resident_pages: u64,
    /// Pages whose predecessor in the file is resident, too.
    neighbours: u64,
    /// Pages among them that follow their predecessor in memory as well.
    adjacent_neighbours: u64,
}

fn placement_of(file: &File) -> Placement {
    let mut placement = Placement::default();
    let mut address_behind = None;
    for position in (0..file.len()).step_by(PAGE as usize) {
        if file.residency(position..position + 1).unwrap().resident == 0 {
            address_behind = None;
            continue;
        }
        placement.resident_pages += 1;
        let address = file.pin(position..position + 1).unwrap().as_ptr() as u64;
        if let Some(behind) = address_behind {
            placement.neighbours += 1;
            placement.adjacent_neighbours += u64::from(address == behind);
        }
        address_behind = Some(address + PAGE);
    }
    placement
}

/// Returns the share of neighbours that are adjacent in memory.
fn adjacency(placement: &Placement) -> f64 {
    placement.adjacent_neighbours as f64 / placement.neighbours as f64
}

#[derive(Clone, Copy, Debug)]
enum Pattern {
    Uniform,
    /// Half of the reads on a tenth of the file.
    Skewed,
}

impl Pattern {
    fn page(self, random: &mut Rng, pages: u64) -> u64 {
        match self {
            Pattern::Skewed if random.bool() => random.u64(..pages / 10) * 10,
            _ => random.u64(..pages),
        }
    }
}

/// Reads, and in one of 16 steps writes, at random from two threads, until the cache has been
/// replaced `turnovers` times. Returns the hit ratio of the last half.
fn churn(cache: &Cache, file: &File, access: Pattern, turnovers: u64) -> f64 {
    let frames = cache.stats().memory.bound_bytes / PAGE;
    let rounds = |turnovers_each: u64| {
        let before = cache.stats();
        let steps: u64 = thread::scope(|scope| {
            let run = |seed| {
                move || {
                    churn_thread(
                        cache,
                        file,
                        access,
                        seed,
                        before.evictions.folios + turnovers_each * frames,
                    )
                }
            };
            let threads = [1, 2].map(|seed| scope.spawn(run(seed)));
            threads.map(|thread| thread.join().unwrap()).iter().sum()
        });
        1.0 - (cache.stats().reads.misses - before.reads.misses) as f64 / steps as f64
    };
    rounds(turnovers / 2);
    rounds(turnovers / 2)
}

fn churn_thread(cache: &Cache, file: &File, access: Pattern, seed: u64, pgsteal: u64) -> u64 {
    let mut random = Rng::with_seed(seed);
    let pages = file.len() / PAGE;
    let mut buffer = [0; PAGE as usize];
    let mut steps = 0;
    while steps % 1024 != 0 || cache.stats().evictions.folios < pgsteal {
        let page = access.page(&mut random, pages);
        if steps % 16 == 0 {
            file.write_all_at(&page.to_le_bytes(), page * PAGE).unwrap();
        } else {
            file.read_exact_at(&mut buffer, page * PAGE).unwrap();
            assert_eq!(u64::from_le_bytes(buffer[..8].try_into().unwrap()), page);
        }
        steps += 1;
    }
    steps
}

/// Fills files in every way, and checks how many neighbours are apart in memory.
fn check_fills(cache: &Cache, len_bytes: u64, folio_bytes: u64, apart_max: impl Fn(u64) -> u64) {
    let mut files = Vec::new();
    for how in FILLS {
        let before = cache.stats();
        let file = fill(cache, len_bytes, folio_bytes, how);
        let placement = placement_of(&file);
        let evicted = cache.stats().evictions.folios - before.evictions.folios;
        let part = adjacency(&placement);
        println!("folios of {folio_bytes}, {how:?}, {evicted} evicted: {part:.3}, {placement:?}");
        // A new table page may have cost chunks, those just filled as well as any.
        assert!(placement.neighbours >= 256, "{how:?}: {placement:?}");
        let apart = placement.neighbours - placement.adjacent_neighbours;
        assert!(apart <= apart_max(placement.neighbours), "{how:?}: {placement:?}");
        // It stays, so that the next one needs other frames.
        files.push(file);
    }
}

/// Few exceptions are allowed, whatever the folio size: within a folio neighbours are always
/// adjacent.
#[test]
fn a_file_filled_in_order_lies_in_order_while_frames_are_free() {
    for folio_bytes in [4 << 10, 64 << 10, 2 << 20] {
        check_fills(&cache_of(64 * MIB), 16 * MIB, folio_bytes, |_| 4);
    }
}

#[test]
fn files_that_are_filled_at_the_same_time_do_not_take_turns() {
    let cache = cache_of(64 * MIB);
    let files = [0; 4].map(|_| open(&cache, 8 * MIB, &writable()));
    for position in (0..8 * MIB).step_by(PAGE as usize) {
        for file in &files {
            file.write_all_at(&[1; PAGE as usize], position).unwrap();
        }
    }
    for file in &files {
        let placement = placement_of(file);
        println!("one of four: {:.3}, {placement:?}", adjacency(&placement));
        assert!(adjacency(&placement) >= 0.9, "{placement:?}");
    }
}

fn check_after_churn(access: Pattern, hit_ratio_min: f64) {
    let bound = 64 * MIB;
    // What is dirty is not moved: little is.
    let cache = Cache::builder().memory(bound).dirty_background(MIB).build().unwrap();
    let churned = open(&cache, 4 * bound, &writable());
    check_after_churn_of(&cache, &churned, access, hit_ratio_min);
}

/// Fills files after a churn. The number of neighbours that are apart (usually a fifth) depends on
/// how soon dirty folios are written, and so on the load of the machine: `bench seq-reads` measures
/// it. If eviction did not free adjacent frames, hardly any would be adjacent.
fn check_after_churn_of(cache: &Cache, churned: &File, access: Pattern, hit_ratio_min: f64) {
    let hit_ratio = churn(cache, churned, access, 20);
    let stats = cache.stats();
    println!(
        "{access:?}: hit ratio {hit_ratio:.4}, {} evicted, {} moved",
        stats.evictions.folios, stats.evictions.relocated_folios
    );
    assert!(hit_ratio >= hit_ratio_min, "{hit_ratio}");
    check_fills(cache, 16 * MIB, PAGE, |neighbours| neighbours * 9 / 10);
}

/// A quarter of the file fits: 23 % hits, as before folios were moved.
#[test]
fn a_file_filled_in_order_lies_in_order_after_uniform_churn() {
    check_after_churn(Pattern::Uniform, 0.22);
}

/// Half of the reads go to what fits easily: 60 % hits, as before folios were moved.
#[test]
fn a_file_filled_in_order_lies_in_order_after_skewed_churn() {
    check_after_churn(Pattern::Skewed, 0.58);
}

/// Clean pages must not be picked out of runs that contain dirty ones.
#[test]
fn a_file_filled_in_order_lies_in_order_after_swapping() {
    let bound = 32 * MIB;
    let directory = directory();
    let builder = Cache::builder().memory(bound).swap_directory(directory.path());
    let cache = builder.build().unwrap();
    let churned = cache.memory_file("churned").unwrap();
    for page in 0..4 * bound / PAGE {
        let mut bytes = [0; PAGE as usize];
        bytes[..8].copy_from_slice(&page.to_le_bytes());
        churned.write_all_at(&bytes, page * PAGE).unwrap();
    }
    check_after_churn_of(&cache, &churned, Pattern::Uniform, 0.2);
}

/// Nearly every extent then has dirty folios. The cache moves them to free extents, and does not
/// swap them out only for that: the file lies mostly in order, and filling it swaps out little.
#[test]
fn a_fill_after_writes_all_over_lies_in_order_and_swaps_out_little() {
    let bound = 64 * MIB;
    let directory = directory();
    let cache = Cache::builder().memory(bound).swap_directory(directory.path()).build().unwrap();
    let (churned, page) = (cache.memory_file("churned").unwrap(), [1; PAGE as usize]);
    for position in (0..2 * bound).step_by(PAGE as usize) {
        churned.write_all_at(&page, position).unwrap();
    }
    let mut random = Rng::with_seed(5);
    for step in 0..10 * bound / PAGE {
        let position = random.u64(..2 * bound / PAGE) * PAGE;
        if step % 2 == 0 {
            churned.write_all_at(&page, position).unwrap();
        } else {
            churned.read_exact_at(&mut [0; PAGE as usize], position).unwrap();
        }
    }
    let before = cache.stats();
    let file = cache.memory_file("filled").unwrap();
    for position in (0..bound / 2).step_by(PAGE as usize) {
        file.write_all_at(&page, position).unwrap();
    }
    let (stats, placement) = (cache.stats(), placement_of(&file));
    let swapped = stats.storage.swapped_out_pages - before.storage.swapped_out_pages;
    let evicted = stats.evictions.folios - before.evictions.folios;
    let part = adjacency(&placement);
    println!("{swapped} swapped, {evicted} evicted: {part:.3}, {placement:?}");
    assert!(placement.neighbours >= 32, "{placement:?}");
    // Less than 0.2 if dirty folios stayed where they are.
    assert!(part >= 0.4, "{part:.3}, {placement:?}");
    assert!(swapped <= evicted * 3 / 2, "{swapped} swapped, {evicted} evicted");
    assert!(before.storage.swapped_out_pages <= before.evictions.folios, "{before:?}");
}

/// Every other pair of pages of a file is read all the time, while the other pairs are evicted.
#[test]
fn neighbours_in_use_are_not_torn_apart() {
    let bound = 16 * MIB;
    let cache = cache_of(bound);
    let churned = open(&cache, 4 * bound, &writable());
    let file = fill(&cache, 2 * MIB, PAGE, Fill::Reads(PAGE));
    file.set_access(Access::Random);
    let mut random = Rng::with_seed(3);
    let mut buffer = [0; PAGE as usize];
    while cache.stats().evictions.folios < 10 * bound / PAGE {
        for _ in 0..1024 {
            let page = random.u64(..churned.len() / PAGE);
            churned.read_exact_at(&mut buffer, page * PAGE).unwrap();
            let page = random.u64(..file.len() / PAGE) & !2;
            file.read_exact_at(&mut buffer, page * PAGE).unwrap();
            assert_eq!(u64::from_le_bytes(buffer[..8].try_into().unwrap()), page);
        }
    }
    let placement = placement_of(&file);
    println!("pairs in use: {:.3}, {placement:?}", adjacency(&placement));
    assert!(placement.resident_pages < 300, "half of it left: {placement:?}");
    assert!(placement.neighbours > 100 && adjacency(&placement) > 0.9, "{placement:?}");
}

/// Folios are only moved for pages that are filled in order: a thread does so from time to time.
const STEPS_PER_RUN: u64 = 64;

/// Two writers, each with its own pages, in a cache of an eighth of the file.
#[test]
fn migrated_folios_keep_their_bytes_and_stay_dirty() {
    let (bound, pages) = (4 * MIB, 8192);
    let storage = Arc::new(MemoryBacking::new(vec![0; (pages * PAGE) as usize]));
    let cache = cache_of(bound);
    let file = cache.open_backing(storage.clone(), &writable()).unwrap();
    let file = &file;
    let roam = move |own: u64| {
        let mut random = Rng::with_seed(own);
        let mut written = vec![0_u64; pages as usize];
        for step in 1..60_000 {
            let page = Pattern::Skewed.page(&mut random, pages / 2) * 2 + own;
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, page * PAGE).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), written[page as usize], "page {page}");
            if step % 4 == 0 {
                written[page as usize] = step;
                file.write_all_at(&step.to_le_bytes(), page * PAGE).unwrap();
            }
            if step % STEPS_PER_RUN == 0 {
                let run = random.u64(..pages / 32) * 32 * PAGE;
                file.read_exact_at(&mut [0; 32 * PAGE as usize], run).unwrap();
            }
        }
        written
    };
    let written = thread::scope(|scope| {
        let threads = [0, 1].map(|own| scope.spawn(move || roam(own)));
        threads.map(|thread| thread.join().unwrap())
    });
    file.sync_data().unwrap();
    let stats = cache.stats();
    assert!(stats.evictions.relocated_folios > 1000 && stats.memory.dirty_bytes == 0, "{stats:?}");
    let stored = storage.bytes();
    for page in 0..pages as usize {
        let at = page * PAGE as usize;
        let found = u64::from_le_bytes(stored[at..at + 8].try_into().unwrap());
        assert_eq!(found, written[page % 2][page], "page {page}");
    }
}

/// A memory file, and what the threads of a test know of it: the word that fills each page.
struct Words {
    file: File,
    /// One page in [`Words::OWNERS`] belongs to each thread that changes pages.
    of_pages: Vec<AtomicU64>,
}

impl Words {
    const OWNERS: u64 = 2;

    fn new(file: File, pages: u64) -> Self {
        Self { file, of_pages: (0..pages).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Changes one page of the owner: by a write, through a pin, or to a hole.
    fn change(&self, page: u64, step: u64) {
        let word = if step.is_multiple_of(16) { 0 } else { step << 16 | page };
        let (range, bytes) = (page * PAGE..(page + 1) * PAGE, word.to_le_bytes().repeat(512));
        match step % 16 {
            0 => self.file.punch_hole(range).unwrap(),
            1..4 => self.file.pin_mut(range).unwrap().copy_from(0, &bytes).unwrap(),
            _ => self.file.write_all_at(&bytes, range.start).unwrap(),
        }
        self.of_pages[page as usize].store(word, Ordering::Relaxed);
    }

    /// Returns the word of a page, which must be whole and of this page.
    fn read(&self, page: u64) -> u64 {
        let mut bytes = [0xEE; PAGE as usize];
        self.file.read_exact_at(&mut bytes, page * PAGE).unwrap();
        let word = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert!(bytes.chunks(8).all(|other| other == word.to_le_bytes()), "page {page} is torn");
        assert!(word == 0 || word & 0xFFFF == page, "page {page} has {word:x}");
        word
    }

    fn known(&self, page: u64) -> u64 {
        self.of_pages[page as usize].load(Ordering::Relaxed)
    }

    /// Changes and checks the pages of an owner, some of which stay pinned for a while.
    fn roam(&self, owner: u64, steps: u64) {
        let mut random = Rng::with_seed(owner);
        let mut pinned = VecDeque::new();
        for step in 1..steps {
            let own = self.of_pages.len() as u64 / Self::OWNERS;
            let page = Pattern::Skewed.page(&mut random, own) * Self::OWNERS + owner;
            assert_eq!(self.read(page), self.known(page), "page {page}");
            match step % 4 {
                0 | 1 => self.change(page, step),
                2 => pinned.push_back(self.file.pin(page * PAGE..(page + 1) * PAGE).unwrap()),
                _ => {
                    self.read(random.u64(..self.of_pages.len() as u64));
                }
            }
            if pinned.len() > 8 {
                pinned.pop_front();
            }
            if step % STEPS_PER_RUN == 0 {
                let run = random.u64(..self.of_pages.len() as u64 / 32) * 32 * PAGE;
                self.file.read_exact_at(&mut [0; 32 * PAGE as usize], run).unwrap();
            }
        }
    }
}

/// The dirty folios of a memory file are moved while other threads use and swap them out.
#[test]
fn moved_folios_of_a_memory_file_keep_their_bytes() {
    let (bound, pages) = (4 * MIB, 4096);
    let directory = directory();
    let cache = Cache::builder().memory(bound).swap_directory(directory.path()).build().unwrap();
    let file = cache.memory_file("moved").unwrap();
    file.set_len(pages * PAGE).unwrap();
    let words = Words::new(file, pages);
    thread::scope(|scope| {
        for owner in 0..Words::OWNERS {
            let words = &words;
            scope.spawn(move || words.roam(owner, 40_000));
        }
    });
    (0..pages).for_each(|page| assert_eq!(words.read(page), words.known(page), "page {page}"));
    let stats = cache.stats();
    println!(
        "{} moved, {} swapped out",
        stats.evictions.relocated_folios, stats.storage.swapped_out_pages
    );
    assert!(
        stats.evictions.relocated_folios > 1000 && stats.storage.swapped_out_pages > 1000,
        "{stats:?}"
    );
    words.file.set_len(0).unwrap();
    let stats = cache.stats();
    assert_eq!((stats.memory.unswapped_bytes, stats.memory.swap_bytes), (0, 0), "{stats:?}");
}
