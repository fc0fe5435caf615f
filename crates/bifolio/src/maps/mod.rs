//! Everything that exists for maps: files as memory that other code loads from and stores to
//! without a call.
//!
//! The folder is a column beside the layers: each part belongs to one layer and names only what
//! that layer may name. Plain code meets maps through [`PageSpace`](crate::memory::PageSpace).
//!
//! ```text
//!   kernel        userfaultfd, page tables, pipes of pages              beside sys
//!   region        addresses, installing, stores, staging, stray pages   beside memory
//!   install       pages that appear whole, and are put back             beside inode
//!   stores        the search for stores                                 beside inode
//!   removal       pages that are cut off                                beside inode
//!   write_copies  write-outs under raw writers                          beside writeback
//!   unmap         eviction under raw writers: UNMAP-B1..B9              beside reclaim
//!   faults        accesses to pages that are not resident               beside file
//!   resources     what all mappable files of a cache share              beside file
//!   growth        the growth of a file under raw writers                beside file
//!   guard         the calls of a file that maps use                     beside file
//!   map           `Map`, `MapMut`, and pins of them                     above file
//! ```

pub(crate) mod faults;
pub(crate) mod growth;
pub(crate) mod guard;
pub(crate) mod install;
pub(crate) mod kernel;
pub(crate) mod map;
pub(crate) mod region;
pub(crate) mod removal;
pub(crate) mod resources;
pub(crate) mod stores;
pub(crate) mod unmap;
pub(crate) mod write_copies;
