//! tantivy over Bifolio: a [`Directory`](tantivy::Directory) that reads and writes an index through
//! a [`Cache`](bifolio::Cache).
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path();
//! use bifolio::Cache;
//! use bifolio_tantivy::BifolioDirectory;
//! use tantivy::schema::{STORED, Schema, TEXT};
//! use tantivy::{Index, IndexWriter, doc};
//!
//! let mut schema = Schema::builder();
//! let title = schema.add_text_field("title", TEXT | STORED);
//!
//! let cache = Cache::builder().memory(256 << 20).build()?;
//! let directory = BifolioDirectory::open(path, &cache)?;
//! let index = Index::open_or_create(directory, schema.build())?;
//!
//! let mut writer: IndexWriter = index.writer(50_000_000)?;
//! writer.add_document(doc!(title => "two leaves, one sheet"))?;
//! writer.commit()?;
//! assert_eq!(index.reader()?.searcher().num_docs(), 1);
//! # Ok(())
//! # }
//! ```
//!
//! The files are those of tantivy's `MmapDirectory`: a program can change between the two.
//!
//! # Memory
//! tantivy reads a file in slices. A slice of at most 64 KiB (a block of stored fields, the
//! postings of most terms) is copied into memory of the program and freed with it. A longer slice
//! (a term dictionary, the postings of a frequent term) is a part of a read-only map, whose pages
//! are inside the bound of the cache. Files of a kernel without `userfaultfd`, which maps need, are
//! copied in any case. Any number of indexes, and other files, can share one cache.
//!
//! A file of an index takes three descriptors while a reader or a searcher uses it: two of the
//! cache and one of its map. A segment has about seven files, so 40 segments are near the usual
//! limit of 1,024 (`RLIMIT_NOFILE`): raise the limit, or let a merge policy keep fewer segments.
//!
//! # Durability
//! A commit returns when its files and their names are on the device. A kill or a loss of power
//! leaves the last commit, and perhaps files that the next writer removes.
//!
//! # Errors
//! A page of a map that cannot be read raises SIGBUS when it is touched, as with `MmapDirectory`;
//! a copy returns the error.

mod directory;
mod slices;
mod watch;
mod writer;

pub use directory::BifolioDirectory;
