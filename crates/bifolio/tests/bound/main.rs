//! The memory bound: resident size, memory for pages and tables, pins, adjacent frames, many open
//! files, and bounds that fall.

mod classes;
mod falling;
mod many_files;
mod pins;
mod placement;
mod resident_size;
mod room;
#[path = "../support/mod.rs"]
mod support;
mod table_room;
