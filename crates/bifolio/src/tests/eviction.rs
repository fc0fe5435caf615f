//! Which pages are evicted: the three lists as a reader of one file sees them.
//!
//! The misses of whole workloads, beside other policies, are measured by `bifolio bench hit-ratio`.

use crate::cache::Cache;
use crate::file::{Access, File, OpenOptions};
use crate::io::DirectIo;
use crate::memory::ListSizes;
use crate::page::PAGE_BYTES;

const FILE_BYTES: u64 = 1 << 30;

/// A file of more pages than any test reads, in a cache of 16 MiB.
struct Reader {
    cache: Cache,
    file: File,
    /// Number of pages that fit in the cache, about.
    fits: u64,
    /// Last page that was read for the first time.
    next: u64,
    _directory: tempfile::TempDir,
}

impl Reader {
    /// Fills the cache by reading 1.2 times as many pages as fit, again and again: most of them are
    /// active in the end, because they are missed soon after they were evicted.
    fn with_active_pages() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::File::create(&path).unwrap().set_len(FILE_BYTES).unwrap();
        let cache = Cache::builder().memory(16 << 20).build().unwrap();
        let options = OpenOptions::new().direct(DirectIo::Never);
        let file = cache.open(&path, &options).unwrap();
        file.set_access(Access::Random);
        let mut reader = Self { cache, file, fits: 3600, next: 0, _directory: directory };
        let around = reader.fits * 6 / 5;
        (0..6).for_each(|_| (0..around).for_each(|page| reader.read(page)));
        reader.next = around;
        let sizes = reader.sizes();
        assert!(sizes.active_pages > sizes.listed_pages() * 7 / 10, "{sizes:?}");
        reader
    }

    fn sizes(&self) -> ListSizes {
        self.cache.list_sizes()
    }

    /// Returns the place of a page in the file. Neighbours are far apart: this is no scan.
    fn place(page: u64) -> u64 {
        page * 5171 % (FILE_BYTES / PAGE_BYTES) * PAGE_BYTES
    }

    fn read(&self, page: u64) {
        self.file.read_exact_at(&mut [0; 8], Self::place(page)).unwrap();
    }

    /// Reads a page for the first time.
    fn read_new(&mut self) -> u64 {
        self.next += 1;
        self.read(self.next);
        self.next
    }

    /// Reads so many new pages that `percent` of those in memory are evicted.
    fn read_percent(&mut self, percent: u64) {
        (0..self.fits * percent / 100).for_each(|_| _ = self.read_new());
    }

    fn is_resident(&self, page: u64) -> bool {
        let range = Self::place(page)..Self::place(page) + PAGE_BYTES;
        self.file.residency(range).unwrap().resident == 1
    }
}

#[test]
fn a_page_used_only_soon_after_its_fill_is_evicted() {
    let mut reader = Reader::with_active_pages();
    reader.read_percent(30);
    let page = reader.read_new();
    reader.read_percent(4);
    reader.read(page);
    reader.read_percent(20);
    assert!(!reader.is_resident(page), "{:?}", reader.sizes());
}

#[test]
fn a_page_used_again_later_is_kept() {
    let mut reader = Reader::with_active_pages();
    reader.read_percent(30);
    let page = reader.read_new();
    reader.read_percent(14);
    reader.read(page);
    reader.read_percent(60);
    assert!(reader.is_resident(page), "{:?}", reader.sizes());
    let activated = reader.cache.stats().evictions.activated_folios;
    assert!(activated > 0);
}

/// Without this rule, the pages that are used while memory fills would lose to those that come
/// later.
#[test]
fn marks_made_before_memory_was_full_count() {
    let mut reader = Reader::with_active_pages();
    reader.file.evict(0..FILE_BYTES).unwrap();
    assert_eq!(reader.sizes().listed_pages(), 0);
    let used: Vec<u64> = (0..500).map(|_| reader.read_new()).collect();
    used.iter().for_each(|page| reader.read(*page));
    reader.read_percent(200);
    let kept = used.iter().filter(|page| reader.is_resident(**page)).count();
    assert_eq!(kept, used.len(), "{:?}", reader.sizes());
}

#[test]
fn probation_has_a_tenth_on_each_of_its_lists() {
    let mut reader = Reader::with_active_pages();
    let pages = reader.fits * 16;
    let mut random = fastrand::Rng::with_seed(5);
    for _ in 0..reader.fits * 10 {
        reader.read(random.u64(0..pages));
    }
    let sizes = reader.sizes();
    let percent = |pages: u64| pages as f64 * 100.0 / sizes.listed_pages() as f64;
    for pages in [sizes.fresh_pages, sizes.old_pages] {
        assert!((8.0..12.0).contains(&percent(pages)), "{sizes:?}");
    }
    reader.next = pages;
    reader.read_percent(100);
    let after = reader.sizes();
    assert!(percent(after.active_pages) > 78.0, "new pages evict active ones: {after:?}");
}

/// A page that was evicted from the active list is a new page when it is read again, however soon.
#[test]
fn a_page_evicted_from_the_active_list_is_not_active_when_it_is_read_again() {
    let mut reader = Reader::with_active_pages();
    // These pages become active one after the other, so the former active ones are evicted.
    for _ in 0..reader.fits * 3 / 2 {
        let new = reader.read_new();
        reader.read(new - reader.fits * 3 / 10);
    }
    let activated = || reader.cache.stats().evictions.refaults_early;
    let (before, refaults) = (activated(), reader.cache.stats().evictions.refaults);
    let gone: Vec<u64> = (0..reader.fits).filter(|page| !reader.is_resident(*page)).collect();
    assert!(gone.len() as u64 > reader.fits / 2);
    gone[..200].iter().for_each(|page| reader.read(*page));
    assert_eq!(reader.cache.stats().evictions.refaults - refaults, 200);
    assert_eq!(activated(), before);
}

/// By the time since their last use alone, every page would be evicted just before its next one.
#[test]
fn a_part_of_a_loop_over_more_than_memory_stays() {
    let reader = Reader::with_active_pages();
    reader.file.evict(0..FILE_BYTES).unwrap();
    let pages = reader.fits * 4;
    let misses_of_a_round = || {
        let misses = || reader.cache.stats().reads.misses;
        let before = misses();
        (reader.next + 1..=reader.next + pages).for_each(|page| reader.read(page));
        misses() - before
    };
    let misses: Vec<u64> = (0..8).map(|_| misses_of_a_round()).collect();
    assert!(misses[7] < pages * 88 / 100, "{misses:?} of {pages}, {:?}", reader.sizes());
}
