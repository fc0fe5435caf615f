//! The parts of the kernel that only maps need: faults of user space (`userfault.rs`), page tables
//! and their marks of stores (`pagemap.rs`), pipes that keep pages while they are unmapped
//! (`page_pipe.rs`), and the unmapping (`pages.rs`).

pub(crate) mod page_pipe;
pub(crate) mod pagemap;
pub(crate) mod pages;
#[cfg(feature = "refusals")]
pub(crate) mod refusals;
pub(crate) mod trials;
pub(crate) mod userfault;
