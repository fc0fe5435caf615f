//! Reads of disk files: one at a time, in batches, asynchronous, ahead, and against a changing
//! length.

mod async_reads;
mod lengths;
mod pin_lists;
mod read_many;
mod read_with;
mod readahead;
#[path = "../support/mod.rs"]
mod support;
mod tail;
