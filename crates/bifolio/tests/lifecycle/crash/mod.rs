//! Bytes that a sync has acknowledged are never lost: not when the process is killed (`kill.rs`,
//! with `child.rs`), not when the machine stops (`power.rs`). `contents.rs` judges the files.

mod child;
mod contents;
mod kill;
mod power;
