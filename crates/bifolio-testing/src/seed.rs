//! Seeds: a fresh one for every run, printed when the run fails, taken from `SEED` to repeat it.

use std::env;

/// The variable that replays a run.
const VARIABLE: &str = "SEED";

/// Runs `body` with `count` fresh seeds; or, if the variable `SEED` is set, once with that one.
///
/// # Panics
/// If `body` does, after printing the seed; or if `SEED` is not a number.
pub fn with_seeds(count: usize, body: impl Fn(u64)) {
    let given = env::var(VARIABLE).ok().map(|text| match parse(&text) {
        Some(seed) => seed,
        None => panic!("{VARIABLE}={text} is not a number (decimal, or 0x and hexadecimal)"),
    });
    let seeds = match given {
        Some(seed) => vec![seed],
        None => (0..count).map(|_| fastrand::u64(..)).collect(),
    };
    for seed in seeds {
        let announcement = Announcement(seed);
        body(seed);
        drop(announcement);
    }
}

/// Names the seed if it is dropped by a panic.
struct Announcement(u64);

impl Drop for Announcement {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this run failed; {VARIABLE}={:#x} replays it", self.0);
        }
    }
}

fn parse(text: &str) -> Option<u64> {
    match text.trim().strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.trim().parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn seeds_are_read_as_they_are_printed() {
        assert_eq!(parse("17"), Some(17));
        assert_eq!(parse(&format!("{:#x}", u64::MAX)), Some(u64::MAX));
        assert_eq!(parse(" 0x1f\n"), Some(31));
        assert_eq!(parse("seed"), None);
        assert_eq!(parse("-1"), None);
    }

    #[test]
    fn each_run_has_its_own_seed() {
        let seen = RefCell::new(Vec::new());
        with_seeds(3, |seed| seen.borrow_mut().push(seed));
        let seen = seen.into_inner();
        if env::var(VARIABLE).is_ok() {
            assert_eq!(seen.len(), 1);
            return;
        }
        assert_eq!(seen.len(), 3);
        assert!(seen[0] != seen[1] && seen[1] != seen[2]);
    }
}
