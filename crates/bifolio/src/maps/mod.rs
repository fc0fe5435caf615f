//! Everything that exists for maps: files as memory that other code loads from and stores to
//! without a call.
//!
//! The folder is a floor above `file`. The floors below name nothing of it: they ask it through
//! traits of their own, whose implementations `cache/builder.rs` passes down. A build without the
//! feature `maps` passes none.
//!
//! ```text
//!   kernel    userfaultfd, page tables, pipes of pages               trials for sys::probe
//!   region    addresses, installing, staging, stray pages            memory::InPlace
//!   pages     pages that appear whole, are put back or cut off       inode::MappedPages
//!   stores    the search for stores, write-outs under raw writers    called by pages
//!   unmap     eviction under raw writers: UNMAP-B1..B9               reclaim::MappedVictims
//!   faults    accesses to pages that are not resident                called by mappable
//!   mappable  what files that can be mapped share; their growth      file::Mapper
//!   map       `Map`, `MapMut`, and pins of them                      the interface
//! ```

pub(crate) mod faults;
pub(crate) mod kernel;
pub(crate) mod map;
pub(crate) mod mappable;
pub(crate) mod pages;
pub(crate) mod region;
pub(crate) mod stores;
pub(crate) mod unmap;
