//! Ends of the windows of a file that its handles issued last.
//!
//! Threads that scan a file through a handle each overtake one another: the one in front then
//! misses where the windows of another end. It continues that reader, with windows of the same
//! length, instead of beginning with small ones; the other finds its next window resident.

use super::readers::{PageAccess, Plan, Sequential};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Number of readers that are remembered.
const FRONTS: usize = 8;
/// Number of windows of other readers after which a reader is forgotten.
const WINDOWS_MAX: u64 = 32;

/// Readers of a file, through any handle, whose windows were issued last.
#[derive(Debug, Default)]
pub(in crate::file) struct Fronts {
    latest: Mutex<Latest>,
    /// Number of readers. Beside the lock, since every miss asks for it.
    count: AtomicU64,
}

#[derive(Debug, Default)]
struct Latest {
    /// Number of windows up to now.
    windows: u64,
    /// Each reader with the number of its last window, the last one first. Allocated with the first
    /// window.
    readers: Vec<(u64, Sequential)>,
}

impl Fronts {
    /// Returns the reader that a miss continues, after some pages in order: a random miss may be
    /// anywhere.
    pub(super) fn continued_by(&self, access: &PageAccess) -> Option<Sequential> {
        if !access.is_in_order() {
            return None;
        }
        let latest = self.latest.lock();
        let found = latest.readers.iter().find(|(_, reader)| reader.ends_at(access.first_page));
        found.map(|(_, reader)| reader.clone())
    }

    /// Returns the number of readers.
    pub(super) fn count(&self) -> u64 {
        // Relaxed: a bound on windows, which may be a moment old.
        self.count.load(Ordering::Relaxed)
    }

    /// Records that `plan` was issued for `reader`, instead of the one whose windows ended in it.
    pub(super) fn note(&self, plan: &Plan, reader: &Sequential) {
        let mut latest = self.latest.lock();
        latest.windows += 1;
        let number = latest.windows;
        let in_plan = plan.pages.start..=plan.pages.end;
        latest.readers.retain(|(last, reader)| {
            number - last <= WINDOWS_MAX && !in_plan.contains(&reader.planned_end())
        });
        latest.readers.truncate(FRONTS - 1);
        latest.readers.insert(0, (number, reader.clone()));
        // Relaxed: see `count`.
        self.count.store(latest.readers.len() as u64, Ordering::Relaxed);
    }

    /// Records that a plan was read only up to page `end`.
    pub(super) fn cut(&self, plan: &Plan, end: u64) {
        let mut latest = self.latest.lock();
        let mut readers = latest.readers.iter_mut().map(|(_, reader)| reader);
        if let Some(reader) = readers.find(|reader| reader.planned_end() == plan.pages.end) {
            reader.cut(end);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::readers::WindowLimits;
    use super::*;

    fn miss(page: u64, pages_in_order: u64) -> PageAccess {
        PageAccess { miss: Some(page), pages_in_order, ..PageAccess::hit(&(page..page + 1)) }
    }

    /// Records the first window of a reader that begins at a page. Returns it.
    fn note(fronts: &Fronts, page: u64) -> Plan {
        let limits = WindowLimits { max_pages: 64, file_pages: 1 << 30, is_announced: false };
        let (reader, plan) = Sequential::start(&miss(page, 8), page, &limits);
        let plan = plan.unwrap();
        fronts.note(&plan, &reader);
        plan
    }

    fn continues(fronts: &Fronts, page: u64, pages_in_order: u64) -> bool {
        fronts.continued_by(&miss(page, pages_in_order)).is_some()
    }

    #[test]
    fn a_miss_in_order_continues_the_reader_whose_windows_end_there() {
        let fronts = Fronts::default();
        let end = note(&fronts, 1000).pages.end;
        note(&fronts, 5000);
        assert_eq!(fronts.count(), 2);
        assert!(continues(&fronts, end, 8) && continues(&fronts, end + 4, 8));
        assert!(!continues(&fronts, end, 3), "a random miss");
        assert!(!continues(&fronts, end - 1, 8) && !continues(&fronts, end + 5, 8));
    }

    #[test]
    fn a_plan_that_is_not_read_to_its_end_continues_where_it_was_cut() {
        let fronts = Fronts::default();
        let plan = note(&fronts, 1000);
        note(&fronts, 5000);
        let cut = plan.pages.end - 3;
        fronts.cut(&plan, cut);
        assert!(continues(&fronts, cut, 8));
        assert!(!continues(&fronts, cut + 5, 8));
    }

    #[test]
    fn readers_without_a_window_for_long_are_forgotten() {
        let fronts = Fronts::default();
        let end = note(&fronts, 1000).pages.end;
        // One reader goes on: its last window takes the place of the one before.
        let mut next = 5000;
        for _ in 0..WINDOWS_MAX {
            next = note(&fronts, next).pages.end;
            assert_eq!(fronts.count(), 2);
        }
        assert!(continues(&fronts, end, 8));
        note(&fronts, next);
        assert_eq!(fronts.count(), 1);
        assert!(!continues(&fronts, end, 8));
        for number in 0..20 {
            note(&fronts, 100_000 * (number + 1));
        }
        assert_eq!(fronts.count(), FRONTS as u64);
    }
}
