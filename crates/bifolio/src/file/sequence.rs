//! Whether the calling thread reads on where it left off: then the next page is worth a touch.
//!
//! A reader that takes a file page by page gives nobody the time to look ahead: the call ends with
//! the copy. So each long read leaves behind where it ended, in its thread and nowhere else, and
//! the next one, if it begins there, touches what comes behind it before it copies. A hint: two
//! files may look alike, and then a touch is wasted.

use crate::page::Hot;
use std::cell::Cell;

thread_local! {
    /// File and position where the thread's last long read ended.
    static LAST_END: Cell<u64> = const { Cell::new(0) };
}

/// Whether a read of `length` bytes of `file` at `position` goes on where the thread's last one
/// ended; notes where this one ends.
#[inline(always)]
pub(super) fn goes_on(file: *const Hot, position: u64, length: u64) -> bool {
    // The bits of the address go where those of a position seldom are.
    let key = (file.addr() as u64).rotate_left(20).wrapping_add(position);
    LAST_END.replace(key.wrapping_add(length)) == key
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_read_goes_on_behind_the_last_one_of_its_thread_and_file() {
        let (file, other) = (Hot::new(0), Hot::new(0));
        assert!(!goes_on(&file, 4096, 4096));
        assert!(goes_on(&file, 8192, 512));
        assert!(!goes_on(&file, 8192, 512), "again, not on");
        assert!(!goes_on(&other, 8704, 512), "another file");
        assert!(!goes_on(&file, 8704, 512), "the other file came between");
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!goes_on(&file, 9216, 512), "another thread"));
        });
        assert!(goes_on(&file, 9216, 512));
    }
}
