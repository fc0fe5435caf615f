//! Ends of the windows of a file that its handles issued last.
//!
//! Threads that scan a file through a handle each overtake one another: the one in front then
//! misses where the windows of another end. It continues that reader, with windows of the same
//! length, instead of beginning with small ones; the other finds its next window resident.

use super::readers::{PageAccess, Plan, Sequential};
use crate::sync::Mutex;

/// Number of readers that are remembered.
const FRONTS: usize = 8;
/// Number of windows of other readers after which a reader is forgotten.
const WINDOWS_MAX: u64 = 32;

/// Readers of a file, through any handle, whose windows were issued last.
#[derive(Debug, Default)]
pub(in crate::file) struct Fronts(Mutex<Latest>);

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
        let latest = self.0.lock();
        let found = latest.readers.iter().find(|(_, reader)| reader.ends_at(access.first_page));
        found.map(|(_, reader)| reader.clone())
    }

    /// Returns the number of readers.
    pub(super) fn count(&self) -> u64 {
        self.0.lock().readers.len() as u64
    }

    /// Records that `plan` was issued for `reader`, instead of the one whose windows ended in it.
    pub(super) fn note(&self, plan: &Plan, reader: &Sequential) {
        let mut latest = self.0.lock();
        latest.windows += 1;
        let number = latest.windows;
        let in_plan = plan.pages.start..=plan.pages.end;
        latest.readers.retain(|(last, reader)| {
            number - last <= WINDOWS_MAX && !in_plan.contains(&reader.planned_end())
        });
        latest.readers.truncate(FRONTS - 1);
        latest.readers.insert(0, (number, reader.clone()));
    }

    /// Records that a plan was read only up to page `end`, for lack of frames.
    pub(super) fn cut(&self, plan: &Plan, end: u64) {
        let mut latest = self.0.lock();
        let mut readers = latest.readers.iter_mut().map(|(_, reader)| reader);
        if let Some(reader) = readers.find(|reader| reader.planned_end() == plan.pages.end) {
            reader.cut(end);
        }
    }
}
