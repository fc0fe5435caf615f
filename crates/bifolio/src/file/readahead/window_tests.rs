//! Tests of windows, with a simulated reader that carries plans out as `readahead` does.

use super::readers::TRANSFER_PAGES;
use super::{Access, PageAccess, STREAMS, Sequential, Streams, WindowLimits};
use crate::Cache;
use std::collections::HashSet;
use std::ops::Range;

const FILE_PAGES: u64 = 1 << 20;
const MAX_PAGES: u64 = 1024;

/// Readers of one file, and a cache that evicts only what a test removes.
struct Readers {
    streams: Streams,
    limits: WindowLimits,
    resident: HashSet<u64>,
    marks: HashSet<u64>,
    plans: Vec<Range<u64>>,
    misses: u64,
}

impl Readers {
    fn new(access: Access) -> Self {
        Self {
            streams: Streams::default(),
            limits: WindowLimits {
                max_pages: MAX_PAGES,
                file_pages: FILE_PAGES,
                is_announced: access == Access::Sequential,
            },
            resident: HashSet::new(),
            marks: HashSet::new(),
            plans: Vec::new(),
            misses: 0,
        }
    }

    /// Reads pages as `File::read_at` does: resident pages in runs, and from the first miss on all
    /// the rest. Returns the plans made on the way.
    fn read(&mut self, pages: Range<u64>) -> Vec<Range<u64>> {
        self.plans.clear();
        let mut first_page = pages.start;
        while first_page < pages.end {
            let is_absent = |page: &u64| !self.resident.contains(page);
            let end_page = (first_page..pages.end).find(is_absent).unwrap_or(pages.end);
            if end_page == first_page {
                self.misses += 1;
                self.tell(miss(first_page..pages.end));
                self.resident.extend(first_page..pages.end);
                continue;
            }
            let marks = self.marks.len();
            self.marks.retain(|mark| !(first_page..end_page).contains(mark));
            if self.marks.len() < marks {
                self.tell(PageAccess::hit(&(first_page..end_page)));
            }
            first_page = end_page;
        }
        self.plans.clone()
    }

    fn tell(&mut self, access: PageAccess) {
        let plan = self.streams.on_access(&access, &self.limits, || None);
        let Some(plan) = plan else { return };
        self.marks.extend(plan.mark);
        let pages = plan.pages;
        assert!(!pages.is_empty(), "{pages:?}");
        assert!(pages.end - pages.start <= self.limits.max_pages, "{pages:?} is too much");
        assert!(pages.end <= self.limits.file_pages, "{pages:?} passes the end");
        self.resident.extend(pages.clone());
        self.plans.push(pages);
    }
}

fn miss(pages: Range<u64>) -> PageAccess {
    PageAccess { miss: Some(pages.start), ..PageAccess::hit(&pages) }
}

/// Returns one plan of one window.
fn window(pages: Range<u64>) -> Vec<Range<u64>> {
    Vec::from([pages])
}

const NOTHING: Vec<Range<u64>> = Vec::new();

#[test]
fn windows_grow_from_four_requests_to_the_largest() {
    let mut readers = Readers::new(Access::Normal);
    assert_eq!(readers.read(0..1), window(0..4));
    let ends = [4, 20, 84, 212, 468, 980];
    // The next window is issued when the reader returns, and when it enters the last one.
    let mut mark = 1;
    for issued in ends.windows(2) {
        for page in mark - 1..mark {
            assert_eq!(readers.read(page..page + 1), NOTHING, "too early, at {page}");
        }
        assert_eq!(readers.read(mark..mark + 1), window(issued[0]..issued[1]));
        mark = issued[0];
    }
    assert_eq!(readers.misses, 1);
}

#[test]
fn a_reader_in_the_middle_gets_windows_of_what_it_has_read() {
    let mut readers = Readers::new(Access::Normal);
    assert_eq!(readers.read(5000..5001), NOTHING);
    assert_eq!(readers.read(5001..5002), window(5001..5005));
    assert_eq!(readers.read(5002..5003), window(5005..5009));
    assert_eq!(readers.read(5003..5005), NOTHING);
    assert_eq!(readers.read(5005..5006), window(5009..5014));
    let start = 5001;
    let (mut page, mut ahead_max) = (5006, 0);
    while next_window(&mut readers, &mut page) < MAX_PAGES {
        let ahead = (page..).take_while(|page| readers.resident.contains(page)).count() as u64;
        assert!(ahead <= 2 * (page - start), "{ahead} pages ahead of page {page}");
        ahead_max = ahead_max.max(ahead);
    }
    assert!(ahead_max > MAX_PAGES / 2, "it has not grown");
    assert!(page < start + 3 * MAX_PAGES, "largest only at page {page}");
}

#[test]
fn a_reader_that_skips_a_few_pages_is_still_the_same_one() {
    for gap_pages in [1, 4] {
        let mut readers = Readers::new(Access::Normal);
        let skipped = |page: u64| page % (gap_pages + 2) < gap_pages;
        for page in (5001..15_000).filter(|page| !skipped(*page)) {
            readers.read(page..page + 1);
        }
        assert!(readers.misses < 50, "{gap_pages}: {} misses", readers.misses);
    }
}

#[test]
fn the_largest_window_is_issued_in_steps_as_the_reader_goes_on() {
    let mut readers = Readers::new(Access::Normal);
    for page in 0..468 {
        readers.read(page..page + 1);
    }
    let steps = [(468, 980..2004), (724, 2004..2772), (980, 2772..3028), (1236, 3028..3284)];
    let mut page = 468;
    for (mark, step) in steps {
        for page in page..mark {
            assert_eq!(readers.read(page..page + 1), NOTHING, "too early, at {page}");
        }
        assert_eq!(readers.read(mark..mark + 1), window(step));
        page = mark + 1;
    }
    assert_eq!(readers.misses, 1);
}

#[test]
fn a_large_request_gets_a_large_window_at_once() {
    let mut readers = Readers::new(Access::Normal);
    assert_eq!(readers.read(0..256), window(0..1024));
    assert_eq!(readers.read(256..512), window(1024..2048));
    assert_eq!(readers.read(512..768), window(2048..2560));
    assert_eq!(readers.read(768..1024), window(2560..2816));

    let mut readers = Readers::new(Access::Normal);
    assert_eq!(readers.read(0..3), window(0..16));
    assert_eq!(readers.read(3..259), [16..80, 80..336, 336..1360]);
}

#[test]
fn a_request_of_a_whole_window_starts_the_next_window() {
    let mut readers = Readers::new(Access::Normal);
    readers.limits.max_pages = 32;
    assert_eq!(readers.read(0..32), [0..32, 32..64]);
    assert_eq!(readers.read(32..64), window(64..96));
    // A request may be larger than a window: then the pages after it are read ahead, not its own.
    let mut streams = Streams::default();
    let limits = readers.limits;
    let miss = miss(0..256);
    let plan = streams.on_access(&miss, &limits, || None).unwrap();
    assert_eq!(plan.mark, Some(0));
    let copied = PageAccess { miss: None, ..miss };
    let plan = streams.on_access(&copied, &limits, || None).unwrap();
    assert_eq!(plan.mark, Some(256));
    assert_eq!(plan.pages, 256..288);
}

#[test]
fn pages_are_planned_once_at_most_two_windows_ahead() {
    for request in [1, 3, 16, 256, 700] {
        let mut readers = Readers::new(Access::Normal);
        readers.limits.file_pages = 20_000;
        let mut planned = 0;
        for start in (0..readers.limits.file_pages).step_by(request as usize) {
            let end = (start + request).min(readers.limits.file_pages);
            for window in readers.read(start..end) {
                assert_eq!(window.start, planned);
                planned = window.end;
            }
            assert!(planned <= end + 2 * MAX_PAGES, "{planned} is far ahead of {end}");
        }
        assert_eq!(
            (planned, readers.misses),
            (readers.limits.file_pages, 1),
            "requests of {request}"
        );
    }
}

#[test]
fn the_first_miss_elsewhere_is_random_the_next_is_not() {
    let mut readers = Readers::new(Access::Normal);
    assert_eq!(readers.read(5000..5003), NOTHING);
    assert_eq!(readers.read(5003..5004), window(5003..5007));

    let mut readers = Readers::new(Access::Normal);
    assert_eq!(readers.read(5000..5003), NOTHING);
    // An access to the last page of the candidate counts: the reader does not know pages.
    readers.resident.remove(&5002);
    assert_eq!(readers.read(5002..5004), window(5002..5010));

    let mut readers = Readers::new(Access::Normal);
    assert_eq!(readers.read(5000..5003), NOTHING);
    assert_eq!(readers.read(5004..5005), NOTHING, "a gap");
    readers.resident.clear();
    assert_eq!(readers.read(5004..5005), NOTHING, "the same again");
    assert_eq!(readers.read(5001..5003), NOTHING, "the end of the same again");
}

#[test]
fn random_reads_plan_nothing() {
    let mut readers = Readers::new(Access::Normal);
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..10_000 {
        let page = random.u64(1..FILE_PAGES / 8) * 8;
        assert_eq!(readers.read(page..page + 1), NOTHING);
    }
}

/// Returns pages in no order, each once, with space between them.
fn places() -> impl Iterator<Item = u64> {
    let count = FILE_PAGES / 64;
    (1..count).map(move |number| number * 7919 % count * 64)
}

#[test]
fn where_most_random_misses_were_continued_the_window_begins_at_once() {
    let mut readers = Readers::new(Access::Normal);
    for place in places().take(9) {
        assert_eq!(readers.read(place..place + 1), NOTHING);
        assert_eq!(readers.read(place + 1..place + 2), window(place + 1..place + 5));
    }
    for place in places().skip(9).take(100) {
        assert_eq!(readers.read(place..place + 1), window(place..place + 4));
        assert_eq!(readers.read(place + 1..place + 2), window(place + 4..place + 8));
    }
    // Reads of single pages end it: none of these is continued.
    let plans = |place: u64| readers.read(place..place + 1).len();
    let pages: Vec<_> = places().skip(109).take(100).map(plans).collect();
    assert!(pages.iter().sum::<usize>() <= 16, "{pages:?}");
    assert_eq!(pages[16..], [0; 84]);
}

#[test]
fn random_misses_of_which_half_are_continued_plan_nothing_at_once() {
    let mut readers = Readers::new(Access::Normal);
    for (number, place) in (0..1000).zip(places()) {
        assert_eq!(readers.read(place..place + 1), NOTHING, "miss {number}");
        if number % 2 == 0 {
            readers.read(place + 1..place + 2);
        }
    }
}

#[test]
fn a_miss_of_two_threads_at_once_is_not_continued() {
    let mut readers = Readers::new(Access::Normal);
    for place in places().take(9) {
        readers.read(place..place + 1);
        readers.read(place + 1..place + 2);
    }
    for place in places().skip(9).take(100) {
        readers.read(place..place + 1);
        readers.tell(miss(place..place + 1));
    }
    readers.plans.clear();
    assert_eq!(readers.read(7..8), NOTHING, "single pages were taken for ranges");
}

#[test]
fn a_miss_that_continues_the_reader_of_another_handle_counts_as_continued() {
    let mut readers = Readers::new(Access::Normal);
    for place in places().take(9) {
        assert_eq!(readers.read(place..place + 1), NOTHING);
        let next = miss(place + 1..place + 2);
        let (of_another, _) = Sequential::start(&next, place + 1, &readers.limits);
        readers.streams.on_access(&next, &readers.limits, || Some(of_another));
        assert!(readers.streams.candidates.is_empty(), "{place} is taken for the end of a read");
    }
    let place = places().nth(9).unwrap();
    assert_eq!(readers.read(place..place + 1), window(place..place + 4));
}

#[test]
fn a_reader_on_trial_is_shown_to_other_handles_once_it_reads_on() {
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let file = cache.memory_file("on trial").unwrap();
    file.set_len(FILE_PAGES << 12).unwrap();
    let handle = &file.handle;
    let plan_at = |page: u64| handle.plan_after_miss(page..page + 1);
    let is_known_at = |page: u64| {
        let after_some = PageAccess { pages_in_order: 100, ..miss(page..page + 1) };
        handle.readahead.fronts.continued_by(&after_some).is_some()
    };
    for place in places().take(9) {
        assert_eq!(plan_at(place), None);
        assert!(plan_at(place + 1).is_some_and(|plan| is_known_at(plan.pages.end)));
    }
    let place = places().nth(9).unwrap();
    let end = plan_at(place).unwrap().pages.end;
    assert_eq!(end, place + 4);
    assert!(!is_known_at(end), "a single miss was taken for a reader");
    let end = plan_at(end).unwrap().pages.end;
    assert!(is_known_at(end));
}

#[test]
fn sequential_readers_and_a_random_one_are_told_apart() {
    let mut readers = Readers::new(Access::Normal);
    let mut random = fastrand::Rng::with_seed(1);
    let streams = STREAMS as u64;
    let before = |start: u64| 100_000 + start * 50_000;
    for step in 0..5000 {
        for page in (0..streams).map(|stream| before(stream) + step) {
            readers.read(page..page + 1);
        }
        for _ in 0..2 * STREAMS * usize::from(step > 2) {
            let page = random.u64(50_000..FILE_PAGES / 8) * 8;
            readers.resident.remove(&page);
            readers.read(page..page + 1);
            readers.misses -= 1;
        }
    }
    assert_eq!(readers.misses, 2 * streams, "two for each to be recognized");
}

#[test]
fn a_new_reader_replaces_the_one_that_has_not_been_seen_longest() {
    let mut readers = Readers::new(Access::Sequential);
    readers.limits.max_pages = 8;
    for start in 0..STREAMS as u64 + 1 {
        readers.read(1000 * start..1000 * start + 1);
        // The first reader stays known.
        readers.read(0..readers.misses + 1);
    }
    readers.limits.is_announced = false;
    readers.resident.clear();
    assert_eq!(readers.read(1004..1005), NOTHING, "the second one was forgotten");
    assert_ne!(readers.read(2004..2005), NOTHING);
    assert_ne!(readers.read(8..9), NOTHING);
}

/// Reads until a window is issued. Returns its number of pages.
fn next_window(readers: &mut Readers, page: &mut u64) -> u64 {
    loop {
        *page += 1;
        if let [only] = &readers.read(*page - 1..*page)[..] {
            return only.end - only.start;
        }
    }
}

#[test]
fn early_evictions_shrink_the_window_for_a_while() {
    let mut readers = Readers::new(Access::Normal);
    let mut page = 0;
    while next_window(&mut readers, &mut page) < MAX_PAGES {}
    for halved in [512, 256, 128] {
        readers.resident.clear();
        readers.marks.clear();
        assert_eq!(readers.read(page..page + 1), window(page..page + halved));
        page += 1;
    }
    let windows: Vec<_> = (0..24).map(|_| next_window(&mut readers, &mut page)).collect();
    let recovered = [[128; 7].as_slice(), &[256; 8], &[512; 8], &[1024]].concat();
    assert_eq!(windows, recovered);
    // In a small cache, too, a window still holds a request after any number of misses.
    readers.limits.max_pages = 16;
    for _ in 0..20 {
        readers.resident.clear();
        let plan = &readers.read(page..page + 7)[0];
        assert!(plan.start == page && plan.end >= page + 7, "{plan:?}");
        page += 7;
    }
    readers.resident.clear();
    assert_eq!(readers.read(page..page + 7)[0], page..page + 7);
    readers.marks.clear();
    let start = page + 14;
    assert_eq!(readers.read(start..start + 11)[0], start..start + 11, "a larger request");
}

#[test]
fn windows_of_a_reader_in_order_shrink_to_a_transfer() {
    let least = |pages_in_order| {
        let mut readers = Readers::new(Access::Normal);
        readers.limits.max_pages = 8 * TRANSFER_PAGES;
        readers.read(0..TRANSFER_PAGES);
        for page in (1..20).map(|number| number * 8) {
            readers.tell(PageAccess { pages_in_order, ..miss(page..page + 1) });
        }
        readers.plans.last().map(|plan| plan.end - plan.start)
    };
    assert!(least(0) <= Some(8));
    assert_eq!(least(100), Some(TRANSFER_PAGES));
}

#[test]
fn a_miss_after_pages_read_in_order_begins_a_reader() {
    let begin = |pages_in_order| {
        let mut readers = Readers::new(Access::Normal);
        readers.tell(PageAccess { pages_in_order, ..miss(5000..5001) });
        readers.plans
    };
    assert_eq!(begin(3), NOTHING);
    assert_eq!(begin(4), window(5000..5004));
    assert_eq!(begin(100), window(5000..5100));
    assert_eq!(begin(5000), window(5000..5000 + MAX_PAGES));
}

#[test]
fn a_reader_that_has_caught_up_gets_larger_windows() {
    let mut readers = Readers::new(Access::Normal);
    readers.read(0..1);
    readers.marks.clear();
    assert_eq!(readers.read(1..4), NOTHING);
    assert_eq!(readers.read(4..5), window(4..20));
}

#[test]
fn no_window_passes_the_end_and_a_file_that_grows_is_followed() {
    let mut readers = Readers::new(Access::Normal);
    readers.limits.file_pages = 10;
    assert_eq!(readers.read(0..2), window(0..8));
    assert_eq!(readers.read(2..4), window(8..10));
    assert_eq!(readers.read(4..10), NOTHING);
    assert!(readers.marks.is_empty());
    readers.limits.file_pages = 12;
    assert_eq!(readers.read(10..11), window(10..12));
    readers.limits.file_pages = 1000;
    assert_eq!(readers.read(11..13), window(12..268));
    // Truncated and grown again: nothing there was evicted.
    readers.limits.file_pages = 20;
    readers.resident.retain(|page| *page < 20);
    assert_eq!(readers.read(13..20), NOTHING);
    readers.limits.file_pages = 1000;
    assert_eq!(readers.read(20..21), window(20..1000));
}

#[test]
fn two_threads_that_miss_the_same_pages_get_the_windows_of_one() {
    for (first_page, start) in [(0, 0), (5000, 5001)] {
        let mut readers = Readers::new(Access::Normal);
        for page in first_page..=start {
            readers.read(page..page + 1);
        }
        readers.plans.clear();
        readers.tell(miss(start..start + 1));
        assert_eq!(readers.plans, NOTHING);
        let second = if start == 0 { 16 } else { 4 };
        let after = start + 4;
        assert_eq!(readers.read(start + 1..start + 2), window(after..after + second));
    }
}

#[test]
fn announced_sequential_reads_have_large_windows_at_once() {
    let mut readers = Readers::new(Access::Sequential);
    assert_eq!(readers.read(7000..7001), window(7000..7512));
    assert_eq!(readers.read(7001..7002), window(7512..8536));
}

#[test]
fn whatever_is_read_plans_stay_within_their_limits() {
    let mut random = fastrand::Rng::with_seed(7);
    for access in [Access::Normal, Access::Sequential] {
        for _ in 0..100 {
            let mut readers = Readers::new(access);
            readers.limits.file_pages = random.u64(1..2000);
            let mut page = 0;
            for _ in 0..300 {
                readers.limits.max_pages = random.u64(1..300);
                let request = random.u64(1..50);
                page = match random.u64(0..20) {
                    0 => random.u64(0..readers.limits.file_pages),
                    1 => page.saturating_sub(request),
                    2 => readers.limits.file_pages - 1,
                    3..6 => page + 100,
                    _ => page,
                };
                if random.u64(0..30) == 0 {
                    readers.resident.retain(|_| random.bool());
                    readers.limits.file_pages = random.u64(1..2000);
                }
                let end = (page + request).min(readers.limits.file_pages);
                readers.read(page..end);
                page = if page < end { end } else { 0 };
            }
        }
    }
}
