//! The tables that have charged pages: where memory for metadata is looked for.
//!
//! PROTOCOL LISTING, as two columns:
//!
//! ```text
//!  CHARGE                                      SEARCH
//!  K1 set the bit, count the page              H1 pop a table, free what it can
//!  K2 listed = 1; was it 0? then add it        H2 pages left? add it
//!     to the list                              H3 else listed = 0; pages now, and listed = 1
//!                                                 was 0? add it
//! ```
//!
//! The later of K2 and H3 sees what the earlier did: so a table with a charged page is on the list,
//! or popped by a thread that will add it again.

use super::table::{TABLE_PAGE_BYTES, Table};
use crate::sync::{AtomicU64, Mutex, Ordering, WeakList};
use std::fmt::Debug;
use std::sync::Arc;

pub(crate) trait HasTable: Send + Sync + Debug {
    fn table(&self) -> &Table;
}

/// The tables that have charged pages, least recently searched first. The cost of a search does not
/// depend on the number of open files without such pages.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    files: Mutex<WeakList<dyn HasTable>>,
    /// Charged pages that evictions do not free.
    kept_pages: AtomicU64,
}

impl Tables {
    /// K2: lists the table, one of whose pages was charged.
    pub(crate) fn enlist<T: HasTable + 'static>(&self, file: &Arc<T>) {
        // Relaxed, here and below: only a count.
        self.kept_pages.fetch_add(file.table().kept_among(1), Ordering::Relaxed);
        // AcqRel: pairs with itself, and with that of `give_back`: the later of K2 and H3 sees what
        // the earlier thread charged, or that the table must be listed again.
        if file.table().listed.swap(1, Ordering::AcqRel) == 0 {
            let file: Arc<dyn HasTable> = Arc::<T>::clone(file);
            self.files.lock().push(Arc::downgrade(&file));
        }
    }

    pub(crate) fn kept_pages(&self) -> u64 {
        self.kept_pages.load(Ordering::Relaxed)
    }

    /// Accounts for the drop of a file's table with its charged pages. Returns their bytes.
    pub(crate) fn forget(&self, table: &Table) -> u64 {
        let bytes = table.charged_bytes();
        let kept_pages = table.kept_among(bytes / TABLE_PAGE_BYTES);
        self.kept_pages.fetch_sub(kept_pages, Ordering::Relaxed);
        bytes
    }

    /// Returns up to `wanted` or slightly more table pages to the kernel. Returns how many; the
    /// caller uncharges them.
    pub(crate) fn give_back(&self, wanted: u64) -> u64 {
        let mut given = 0;
        let count = self.files.lock().len();
        for _ in 0..count {
            let Some(file) = self.files.lock().pop() else { break };
            let table = file.table();
            let pages = table.give_back();
            given += pages;
            self.kept_pages.fetch_sub(table.kept_among(pages), Ordering::Relaxed);
            let has_pages = || table.charged_bytes() > 0;
            let mut stays = has_pages();
            if !stays {
                // AcqRel: pairs with that of `enlist`.
                table.listed.swap(0, Ordering::AcqRel);
                stays = has_pages() && table.listed.swap(1, Ordering::AcqRel) == 0;
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::page::{Entry, MemorySource, Values};

    #[derive(Debug)]
    struct File(Table);

    impl HasTable for File {
        fn table(&self) -> &Table {
            &self.0
        }
    }

    #[test]
    fn only_tables_with_charged_pages_are_searched() {
        let tables = Tables::default();
        let mut files: Vec<_> = (0..1000)
            .map(|_| {
                Arc::new(File(Table::new(&MemorySource::Private, 2048, Values::Hints).unwrap()))
            })
            .collect();
        let charge = |number: usize, index| {
            assert!(files[number].0.set_charged(index));
            tables.enlist(&files[number]);
        };
        for number in [3, 500, 999] {
            charge(number, 0);
            charge(number, 600);
        }
        let listed = || tables.files.lock().len();
        assert_eq!(listed(), 3, "one entry per table");
        files[500].0.store(7, Entry::folio(3, 0, 0), Ordering::Relaxed);
        assert_eq!(tables.give_back(1), 2, "all pages of the first table");
        assert_eq!(listed(), 2);
        charge(3, 1200);
        assert_eq!((listed(), tables.give_back(100), listed()), (3, 4, 1));
        assert_eq!((tables.give_back(100), listed()), (0, 1), "the page names a folio");
        files.clear();
        assert_eq!((tables.give_back(100), listed()), (0, 0));
    }
}
