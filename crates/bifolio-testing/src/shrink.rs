//! Reduces operations that fail to a short sequence that fails in the same way.

/// Searches a short subsequence of `ops` for which `fails` still returns an error; returns it with
/// that error. `None` if `fails` returns none for all of them. Calls `fails` at most `attempts_max`
/// times.
pub fn shrink<T: Clone, E>(
    ops: &[T],
    attempts_max: usize,
    fails: impl Fn(&[T]) -> Option<E>,
) -> Option<(Vec<T>, E)> {
    let mut best = (ops.to_vec(), fails(ops)?);
    let mut attempts = 0;
    let mut part = ops.len().div_ceil(2);
    while part > 0 {
        let mut start = 0;
        let mut removed = false;
        while start < best.0.len() && attempts < attempts_max {
            let mut rest = best.0[..start].to_vec();
            rest.extend_from_slice(&best.0[best.0.len().min(start + part)..]);
            attempts += 1;
            match fails(&rest) {
                Some(answer) => {
                    best = (rest, answer);
                    removed = true;
                }
                None => start += part,
            }
        }
        if attempts >= attempts_max || (part == 1 && !removed) {
            break;
        }
        part = if part == 1 { 1 } else { part / 2 };
    }
    Some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_that_are_not_needed_go_and_the_order_stays() {
        let ops: Vec<u32> = (0..100).collect();
        let fails = |ops: &[u32]| {
            let needed = ops.contains(&17) && ops.contains(&71) && ops.contains(&18);
            needed.then_some("fails")
        };
        assert_eq!(shrink(&ops, 1000, fails), Some((vec![17, 18, 71], "fails")));
        assert_eq!(shrink(&ops[20..], 1000, fails), None);
        let (rest, _) = shrink(&ops, 1, fails).unwrap();
        assert_eq!(rest.len(), 100, "one attempt was not enough for anything");
    }
}
