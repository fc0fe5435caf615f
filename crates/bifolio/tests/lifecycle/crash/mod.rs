//! Nothing that a sync has acknowledged is ever lost: not when the process is killed (`kill.rs`,
//! with `child.rs`), not when the machine stops (`power.rs`). What the files then hold is judged by
//! `contents.rs`.

mod child;
mod contents;
mod kill;
mod power;
