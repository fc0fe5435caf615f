//! Giving pages of a table back whose Entries name nothing any more.
//!
//! Called by `reclaim` when memory for metadata is short. A page of a table that names no folio,
//! nor a slot of the swap, says nothing that a hole does not, but for shadows, which are hints and
//! go with it. Its memory goes back to the kernel; its address space stays, and reads as zeros,
//! which are holes: so readers need not know (FRAMES-2 is the same rule for frames).
//!
//! ```text
//!  FILL (who inserts a folio)                  GIVE BACK
//!  T1 fillers + 1; closed? take it back,       G1 fillers 0 -> CLOSED; else give up
//!     wait, again                              G2 a page that is charged: does any Entry name
//!  T2 charged? else charge, set the bit           a folio, or a slot? then leave it
//!  T3 insert (I1, I2)                          G3 give the memory back, clear the bit, uncharge
//!  T4 fillers - 1                              G4 open again
//! ```
//!
//! Nobody but T3 makes an Entry name a folio where none did (MAPPING-1): evictions, removals and
//! collapses store over Entries of a folio, and the first page of that, which G2 looks at first, is
//! the last they store to. So between G1 and G4 a page that passed G2 stays as it is.
//!
//! Who charges a page looks for frames before T1, which may be what gives that very page back: then
//! it does both again after T1, once, and waits for room that is not its own. (G1 gives up, and
//! waits for no filler, so a filler may wait.)
//!
//! A reader that has lost its processor between the load of an Entry and the mark it sets there may
//! touch a page that went meanwhile: its exchange fails, but 4 KiB are resident and not charged
//! then, until the page is charged again or the file is closed.

use super::entry::Entry;
use super::table::Table;
use crate::sync::{AtomicU8, AtomicU64, Backoff, Mutex, Ordering, WeakList};
use std::fmt::Debug;
use std::sync::Arc;

/// Nobody may fill.
const CLOSED: u64 = 1 << 63;
/// Charged pages that are looked at in one go: fillers wait for it.
const LOOKED_AT_MAX: u64 = 64;

/// How many are filling pages of a table, or that nobody may.
#[derive(Debug, Default)]
pub(super) struct Fillers(AtomicU64);

/// While it lives, no page of the table is given back.
#[derive(Debug)]
#[must_use]
pub(crate) struct Filling<'t>(&'t Fillers);

impl Fillers {
    /// T1.
    pub(super) fn enter(&self) -> Filling<'_> {
        let mut backoff = Backoff::default();
        loop {
            // Acquire: pairs with the Release of G4: we see which pages are charged no more.
            if self.0.fetch_add(1, Ordering::Acquire) & CLOSED == 0 {
                return Filling(self);
            }
            self.0.fetch_sub(1, Ordering::Relaxed);
            backoff.wait();
        }
    }

    /// G1 to G4 around `work`; whether nobody was filling.
    pub(super) fn close_for(&self, work: impl FnOnce()) -> bool {
        // Acquire: pairs with the Release of T4: we see what was inserted. On failure, Relaxed:
        // nothing is looked at.
        let exchange = (Ordering::Acquire, Ordering::Relaxed);
        if self.0.compare_exchange(0, CLOSED, exchange.0, exchange.1).is_err() {
            return false;
        }
        work();
        // Release: pairs with the Acquire of T1.
        self.0.fetch_and(!CLOSED, Ordering::Release);
        true
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire of G1: what was inserted is seen.
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

/// A file that has a table.
pub(crate) trait HasTable: Send + Sync + Debug {
    /// The table.
    fn table(&self) -> &Table;
    /// Whether what an Entry holds without a folio is more than a hint.
    fn keeps_values(&self) -> bool;
}

/// Whether a table is among [`Tables`]: see there.
#[derive(Debug, Default)]
pub(super) struct Listed(AtomicU8);

impl Listed {
    /// Says that it is; whether it was not, and is to be put there.
    fn begin(&self) -> bool {
        // AcqRel: pairs with itself in `end`: of the two that meet, the second sees what the first
        // has charged, or that it is to be listed again.
        self.0.swap(1, Ordering::AcqRel) == 0
    }

    /// Says that it is not; what was charged before it was last listed is seen afterwards.
    fn end(&self) {
        // AcqRel: pairs with itself in `begin`.
        self.0.swap(0, Ordering::AcqRel);
    }
}

/// The tables that have pages which are charged, those first that were not looked at for longest.
/// What a look for pages costs does not grow with files that have none, however many are open.
///
/// ```text
///  CHARGE                                      LOOK
///  K1 set the bit, count the page              H1 take a table off, give back what it can
///  K2 listed = 1; was it 0? then put it        H2 pages left? put it on
///     on the list                              H3 else listed = 0; pages now, and listed = 1
///                                                 was 0? put it on
/// ```
///
/// Whichever of K2 and H3 comes second sees what the other did: so a table with a page that is
/// charged is on the list, or in the hands of somebody who will put it there.
#[derive(Debug)]
pub(crate) struct Tables {
    files: Mutex<WeakList<dyn HasTable>>,
}

impl Default for Tables {
    fn default() -> Self {
        Self { files: Mutex::new(WeakList::default()) }
    }
}

impl Tables {
    /// K2: a page of the table has been charged.
    pub(crate) fn enlist<T: HasTable + 'static>(&self, file: &Arc<T>) {
        if file.table().listed.begin() {
            let file: Arc<dyn HasTable> = Arc::<T>::clone(file);
            self.files.lock().push(Arc::downgrade(&file));
        }
    }

    /// Gives back pages of tables, `wanted` or a few more, if there are so many; how many. The
    /// caller takes them off the budget.
    pub(crate) fn give_back(&self, wanted: u64) -> u64 {
        let mut given = 0;
        let count = self.files.lock().len();
        for _ in 0..count {
            let Some(file) = self.files.lock().pop() else { break };
            let table = file.table();
            given += table.give_back(file.keeps_values());
            let has_pages = || table.charged_bytes() > 0;
            let mut stays = has_pages();
            if !stays {
                table.listed.end();
                stays = has_pages() && table.listed.begin();
            }
            if stays {
                self.files.lock().push(Arc::downgrade(&file));
            }
            if given >= wanted {
                break;
            }
        }
        given
    }
}

impl Table {
    /// Gives back what names nothing, of some of the pages that are charged: the next ones each
    /// time. How many.
    pub(crate) fn give_back(&self, keeps_values: bool) -> u64 {
        if self.charged_bytes() == 0 {
            return 0;
        }
        let is_needed = |entry: Entry| entry.is_folio() || keeps_values && entry != Entry::HOLE;
        let mut given = 0;
        self.fillers.close_for(|| {
            // Relaxed: a hint of where to look, under the closure.
            let mut at = self.looked_at.load(Ordering::Relaxed);
            for _ in 0..LOOKED_AT_MAX {
                let Some(page) = self.next_charged(at) else {
                    at = 0;
                    break;
                };
                at = page + 1;
                if !self.any_of(page, is_needed) && self.discharge(page) {
                    given += 1;
                }
            }
            self.looked_at.store(at, Ordering::Relaxed);
        });
        given
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct File(Table);

    impl HasTable for File {
        fn table(&self) -> &Table {
            &self.0
        }

        fn keeps_values(&self) -> bool {
            false
        }
    }

    #[test]
    fn only_tables_that_have_pages_are_looked_at() {
        let tables = Tables::default();
        let mut files: Vec<_> =
            (0..1000).map(|_| Arc::new(File(Table::new(2048).unwrap()))).collect();
        let charge = |number: usize, index| {
            assert!(files[number].0.set_charged(index));
            tables.enlist(&files[number]);
        };
        for number in [3, 500, 999] {
            charge(number, 0);
            charge(number, 600);
        }
        let listed = || tables.files.lock().len();
        assert_eq!(listed(), 3, "once each, however many pages it has");
        files[500].0.store(7, Entry::folio(3, 0, 0), Ordering::Relaxed);
        assert_eq!(tables.give_back(1), 2, "all of the first one");
        assert_eq!(listed(), 2);
        charge(3, 1200);
        assert_eq!((listed(), tables.give_back(100), listed()), (3, 4, 1));
        assert_eq!((tables.give_back(100), listed()), (0, 1), "it names a folio");
        files.clear();
        assert_eq!((tables.give_back(100), listed()), (0, 0));
    }
}
