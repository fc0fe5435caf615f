//! Interrupts from one CPU to another, as the kernel counts them for the whole machine.
//!
//! Sampled before and after a window; interrupts of other programs are included. Each kind is found
//! by the kernel's description, since the short names differ between processor families. A kind
//! that this machine does not have (some flush remote TLBs without an interrupt) is not counted.

use std::fs;

use crate::error::{Error, Result};

/// Name of each kind, and the kernel's description.
const KINDS: [(&str, &str); 2] =
    [("tlb_shootdowns", "TLB shootdowns"), ("function_call_ipis", "Function call interrupts")];

/// Returns all counts so far, by kind, always in the same order.
pub(crate) fn counts() -> Result<Vec<(&'static str, u64)>> {
    let text = fs::read_to_string("/proc/interrupts");
    Ok(counts_in(&text.map_err(Error::system("read /proc/interrupts"))?))
}

fn counts_in(text: &str) -> Vec<(&'static str, u64)> {
    let count = |words| text.lines().find_map(|line| sum_of_line(line, words));
    KINDS.iter().filter_map(|&(name, words)| Some((name, count(words)?))).collect()
}

/// Returns the sum over all CPUs, if the line ends with `words`.
fn sum_of_line(line: &str, words: &str) -> Option<u64> {
    let numbers = line.trim_end().strip_suffix(words)?.split_whitespace().skip(1);
    Some(numbers.map_while(|number| number.parse::<u64>().ok()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_cpus_are_added_up_and_an_absent_kind_is_not_zero() {
        let text = "            CPU0       CPU1\n\
                    CAL:   100    20   Function call interrupts\n\
                    TLB:     7     0   TLB shootdowns\n";
        assert_eq!(counts_in(text), [("tlb_shootdowns", 7), ("function_call_ipis", 120)]);
        let other = " IPI1:  3  4  5       Function call interrupts\nERR: 1\n";
        assert_eq!(counts_in(other), [("function_call_ipis", 12)]);
    }

    #[test]
    fn this_machine_counts_at_least_one_kind() {
        assert!(!counts().unwrap().is_empty());
    }
}
