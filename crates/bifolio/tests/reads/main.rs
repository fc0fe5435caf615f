//! Reads of disk files: one at a time, in batches, ahead, and against a changing length.

mod lengths;
mod modes;
mod read_many;
mod readahead;
#[path = "../support/mod.rs"]
mod support;
mod tail;
