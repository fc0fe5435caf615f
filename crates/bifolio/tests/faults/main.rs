//! Storage that fails: errors and their messages, single calls (`calls.rs`), batches of transfers
//! (`batched_reads.rs`, `batched_writes.rs`, `readahead.rs`, `refused_transfers.rs`), one broken
//! device beside healthy ones (`devices.rs`), backings that panic (`panics.rs`).

mod batched_reads;
mod batched_writes;
mod calls;
mod devices;
mod errors;
mod panics;
mod read_errors;
mod readahead;
mod refused_transfers;
#[path = "../support/mod.rs"]
mod support;
