//! Classes of files in a scene: floors, ceilings and orders, which the library must keep at any
//! moment.

use crate::history::Violation;
use bifolio::{Cache, OpenOptions};
use fastrand::Rng;

const NAMES: [&str; 2] = ["first", "second"];
/// A cache from which on classes have ceilings: in a smaller one the pins of a few calls reach
/// them, and calls fail.
const CEILING_MEMORY_BYTES: u64 = 1 << 20;

/// Makes classes in half of the scenes. Returns `true` if it did.
pub fn make(cache: &Cache, memory_bytes: u64, random: &mut Rng) -> bifolio::Result<bool> {
    if random.bool() {
        return Ok(false);
    }
    for name in NAMES {
        let class = cache.class(name)?;
        class.set_floor(memory_bytes / random.choice([4, 16, 1 << 20]).unwrap_or(4))?;
        class.set_order(random.choice([0, 128, 255]).unwrap_or(128));
        if memory_bytes >= CEILING_MEMORY_BYTES && random.bool() {
            class.set_ceiling(Some(memory_bytes / random.u64(1..=2)))?;
        }
    }
    Ok(true)
}

/// Puts the file into a class, or leaves it in none.
pub fn choose(options: OpenOptions, random: &mut Rng) -> OpenOptions {
    match random.usize(..=NAMES.len()) {
        0 => options,
        number => options.class(NAMES[number - 1]),
    }
}

/// Checks that no class has more than its ceiling.
pub fn check(cache: &Cache) -> Result<(), Violation> {
    match cache.classes().into_iter().find(|class| class.resident_bytes > class.ceiling_bytes) {
        Some(class) => Err(Violation(format!("above its ceiling: {class:?}"))),
        None => Ok(()),
    }
}

/// Checks, once all files are closed, that the classes have no more pages than there are: those
/// that LRU batches still reference.
pub fn check_at_rest(cache: &Cache) -> Result<(), Violation> {
    let classes = cache.classes();
    let counted_bytes: u64 = classes.iter().map(|class| class.resident_bytes).sum();
    let memory = cache.stats().memory;
    let used_bytes = memory.frame_bytes - memory.free_bytes;
    if counted_bytes > used_bytes {
        return Err(Violation(format!("{used_bytes} bytes of pages are left: {classes:?}")));
    }
    Ok(())
}
