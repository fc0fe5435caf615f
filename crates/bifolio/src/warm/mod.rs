//! The pages that are hot when a program ends, read again when it has begun anew.
//!
//! ```text
//!   save_hot     tables of all files --> runs of pages, by coldness --> a list    save.rs, list.rs
//!   restore_hot  the list --> a plan --> a thread: claims, transfers, marks       restore.rs
//!   first open of a file -- note_open ------'
//! ```
//!
//! A list names positions, never bytes: what is read is what the file has, through the same fills
//! as every other read. So a wrong list costs reads of pages that are not needed, and nothing else;
//! and a file that was written since the list was saved is read all the same, at the pages that
//! were hot then. (Leaving it out would leave out every database whose process was killed: a list
//! that is saved now and then is always older than the last write.) A file that is shorter is read
//! up to its end; another file in its place, not at all ([`ListedFile::is`](list::ListedFile::is)).
//!
//! Coldness, from what an eviction would look at: 0, active, and used since the last scan; 1, on
//! probation, and used; 2, active; 3, on probation. Pages that were read ahead and not used are not
//! listed. A page that was used is marked as such when it is restored: the first scan makes it
//! active again, and evicts the others. (Without marks it would evict the hottest pages, which came
//! first.)
//!
//! Only frames that are free are filled: a restore ends where reclaim would begin. It competes with
//! the program for the device alone, and has at most half as many transfers in flight as one call.

mod list;
mod restore;
mod save;

pub(crate) use restore::restore;
pub use restore::{HotRestore, RestoreProgress};
pub use save::SavedHot;
pub(crate) use save::save;
