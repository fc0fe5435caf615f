//! Where the pages of each series are: a trait for one search in one page, and its implementations.
//!
//! The caches of others hold pages of 4 KiB by their number, as a hand-made buffer pool does, and
//! fill them by `pread` with `O_DIRECT`, so that no page is in memory twice.
//!
//! # Safety
//! Maps a file that no other process changes while the benchmark runs.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use memmap2::{Advice, Mmap};
use redb::{Database, ReadOnlyTable, ReadableDatabase, TableDefinition};

use super::tree::{PAGE_BYTES, Tree, search, value, word_of};
use crate::values::forget;

/// A row is looked up from several threads.
pub(super) trait Lookup: Send + Sync {
    /// Returns the value of `key`.
    fn look_up(&self, key: u64) -> anyhow::Result<u64>;
}

/// Storage of the pages of a tree.
trait Pages: Send + Sync {
    /// Searches a page, as [`search`] does.
    fn search(&self, page: u64, key: u64) -> anyhow::Result<(u64, u64)>;
}

struct InPages<P> {
    pages: P,
    tree: Tree,
}

impl<P: Pages> Lookup for InPages<P> {
    fn look_up(&self, key: u64) -> anyhow::Result<u64> {
        let mut next = self.tree.root;
        let mut found = 0;
        for _ in 0..self.tree.levels {
            (found, next) = self.pages.search(next, key)?;
        }
        ensure!(found == key, "key {key} is not found");
        Ok(next)
    }
}

/// Opens the tree at `path`, or the database of redb beside it, for the series `name`. A cache of
/// its own gets `bytes`.
pub(super) fn open(
    name: &str,
    path: &Path,
    tree: Tree,
    bytes: u64,
) -> anyhow::Result<Box<dyn Lookup>> {
    // With its counts, and what the alignment leaves free.
    let pages = (bytes / (size_of::<Page>() + align_of::<Page>()) as u64).max(1);
    Ok(match name {
        "bifolio" => Box::new(InPages { pages: Bifolio::open(path, bytes)?, tree }),
        "mmap" => Box::new(InPages { pages: Mapped::open(path)?, tree }),
        "quick_cache" => {
            let cache = quick_cache::sync::Cache::new(pages as usize);
            Box::new(InPages { pages: Filled { file: direct(path)?, cache }, tree })
        }
        "foyer" => {
            let cache = foyer_memory::CacheBuilder::new(pages as usize).build();
            Box::new(InPages { pages: Filled { file: direct(path)?, cache: Foyer(cache) }, tree })
        }
        "moka" => {
            let cache = moka::sync::Cache::new(pages);
            Box::new(InPages { pages: Filled { file: direct(path)?, cache }, tree })
        }
        "redb" => Box::new(Redb::open(&path.with_extension("redb"), bytes)?),
        _ => anyhow::bail!("there is no series {name}"),
    })
}

struct Bifolio {
    file: bifolio::File,
    /// Keeps the background threads.
    _cache: bifolio::Cache,
}

impl Bifolio {
    fn open(path: &Path, bytes: u64) -> anyhow::Result<Self> {
        let cache = bifolio::Cache::builder().memory(bytes).build()?;
        let file = cache.open(path, &bifolio::OpenOptions::new().read(true))?;
        file.set_access(bifolio::Access::Random);
        Ok(Self { file, _cache: cache })
    }
}

impl Pages for Bifolio {
    #[inline]
    fn search(&self, page: u64, key: u64) -> anyhow::Result<(u64, u64)> {
        let start = page * PAGE_BYTES as u64;
        Ok(self.file.read_with(start..start + PAGE_BYTES as u64, |view| {
            search(key, |offset| view.u64_le(offset).unwrap_or(0))
        })?)
    }
}

struct Mapped(Mmap);

impl Mapped {
    fn open(path: &Path) -> anyhow::Result<Self> {
        // SAFETY: the file is not changed while it is mapped, as the head of this file says.
        let map = unsafe { Mmap::map(&File::open(path)?)? };
        map.advise(Advice::Random)?;
        Ok(Self(map))
    }
}

impl Pages for Mapped {
    #[inline]
    fn search(&self, page: u64, key: u64) -> anyhow::Result<(u64, u64)> {
        let bytes = self.0[page as usize * PAGE_BYTES..].first_chunk().context("a short file")?;
        Ok(search(key, |offset| word_of(bytes, offset)))
    }
}

/// A page, aligned as devices ask for transfers past the page cache.
#[repr(C, align(512))]
struct Page([u8; PAGE_BYTES]);

/// A cache of another library: pages by their number.
trait Cache: Send + Sync {
    fn get(&self, page: u64) -> Option<Arc<Page>>;
    fn insert(&self, page: u64, bytes: Arc<Page>);
}

struct Filled<C> {
    file: File,
    cache: C,
}

impl<C: Cache> Pages for Filled<C> {
    #[inline]
    fn search(&self, page: u64, key: u64) -> anyhow::Result<(u64, u64)> {
        let held = match self.cache.get(page) {
            Some(held) => held,
            None => {
                let mut read = Box::new(Page([0; PAGE_BYTES]));
                self.file.read_exact_at(&mut read.0, page * PAGE_BYTES as u64)?;
                let read = Arc::from(read);
                self.cache.insert(page, Arc::clone(&read));
                read
            }
        };
        Ok(search(key, |offset| word_of(&held.0, offset)))
    }
}

/// Opens a file past the page cache, where the file system can.
fn direct(path: &Path) -> anyhow::Result<File> {
    let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    let opened = File::options().read(true).custom_flags(flags).open(path);
    opened.or_else(|_| File::open(path)).with_context(|| format!("open {}", path.display()))
}

impl Cache for quick_cache::sync::Cache<u64, Arc<Page>> {
    #[inline]
    fn get(&self, page: u64) -> Option<Arc<Page>> {
        Self::get(self, &page)
    }

    fn insert(&self, page: u64, bytes: Arc<Page>) {
        Self::insert(self, page, bytes);
    }
}

impl Cache for moka::sync::Cache<u64, Arc<Page>> {
    #[inline]
    fn get(&self, page: u64) -> Option<Arc<Page>> {
        Self::get(self, &page)
    }

    fn insert(&self, page: u64, bytes: Arc<Page>) {
        Self::insert(self, page, bytes);
    }
}

type FoyerCache = foyer_memory::Cache<u64, Arc<Page>>;

struct Foyer(FoyerCache);

impl Cache for Foyer {
    #[inline]
    fn get(&self, page: u64) -> Option<Arc<Page>> {
        self.0.get(&page).map(|entry| Arc::clone(entry.value()))
    }

    fn insert(&self, page: u64, bytes: Arc<Page>) {
        self.0.insert(page, bytes);
    }
}

/// The part of what a cache gets that redb's gets: it reads through the kernel's page cache, which
/// needs the rest, and fails for good if the group has no memory for a read.
const REDB_PART: u64 = 4;
const TABLE: TableDefinition<'_, u64, u64> = TableDefinition::new("rows");

struct Redb {
    table: ReadOnlyTable<u64, u64>,
    _database: Database,
}

impl Redb {
    fn open(path: &Path, bytes: u64) -> anyhow::Result<Self> {
        let database =
            Database::builder().set_cache_size((bytes / REDB_PART) as usize).open(path)?;
        let table = database.begin_read()?.open_table(TABLE)?;
        Ok(Self { table, _database: database })
    }
}

impl Lookup for Redb {
    fn look_up(&self, key: u64) -> anyhow::Result<u64> {
        let value = self.table.get(key)?.with_context(|| format!("key {key} is not found"))?;
        Ok(value.value())
    }
}

/// Makes the same rows as a table of redb, beside the tree.
pub(super) fn build_redb(path: &Path, rows: u64) -> anyhow::Result<()> {
    let path = path.with_extension("redb");
    let database = Database::builder().set_cache_size(256 << 20).create(&path)?;
    let keys: Vec<u64> = (0..rows).map(super::tree::key).collect();
    for keys in keys.chunks(1_000_000) {
        let transaction = database.begin_write()?;
        let mut table = transaction.open_table(TABLE)?;
        for key in keys {
            table.insert(key, value(*key))?;
        }
        drop(table);
        transaction.commit()?;
    }
    drop(database);
    forget(&path)
}

#[cfg(test)]
mod tests {
    use super::super::SERIES;
    use super::super::tree::{build, key};
    use super::*;

    #[test]
    fn every_series_finds_the_same_rows() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tree");
        let rows = 100_000;
        let tree = build(&path, rows).unwrap();
        build_redb(&path, rows).unwrap();
        for name in SERIES {
            // Smaller than the tree.
            let lookup = open(name, &path, tree, 1 << 20).unwrap();
            for row in (0..rows).step_by(77).chain([rows - 1, 0]) {
                assert_eq!(lookup.look_up(key(row)).unwrap(), value(key(row)), "{name}");
            }
            assert!(lookup.look_up(key(7) + 1).is_err(), "{name}");
        }
    }
}
