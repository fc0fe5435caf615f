//! Everything that exists for maps: files as memory that other code loads from and stores to
//! without a call.
//!
//! The folder is a column beside the layers: each part belongs to one layer and names only what
//! that layer may name. Plain code meets maps through [`PageSpace`](crate::memory::PageSpace).
//!
//! ```text
//!   kernel    userfaultfd, page tables, pipes of pages               beside sys
//!   region    addresses, installing, staging, stray pages            beside memory
//!   pages     pages that appear whole, are put back or cut off       beside inode
//!   stores    the search for stores, write-outs under raw writers    beside writeback
//!   unmap     eviction under raw writers: UNMAP-B1..B9               beside reclaim
//!   faults    accesses to pages that are not resident                beside file
//!   mappable  what files that can be mapped share; their growth      beside file
//!   map       `Map`, `MapMut`, and pins of them                      above file
//! ```

pub(crate) mod faults;
pub(crate) mod kernel;
pub(crate) mod map;
pub(crate) mod mappable;
pub(crate) mod pages;
pub(crate) mod region;
pub(crate) mod stores;
pub(crate) mod unmap;
