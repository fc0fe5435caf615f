//! Model of which units of a memory file are allocated and which are data, as far as a caller can
//! know.
//!
//! A unit is a folio of the file's own size. Written units are data until they are punched or cut
//! off. Holes must be reported as holes, and cost nothing. A third state is allocated space without
//! data (`allocate`, or punched in parts): it reads as zeros, and a seek may report either. A hole
//! that was pinned is allocated space until its memory is needed.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

/// A unit that is not a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// Pinned hole: all zeros, in memory or not; a seek may report data or a hole.
    Spare,
    /// Allocated: all zeros; a seek may report data or a hole.
    Room,
    /// Data: a seek reports data.
    Data,
}

/// Model of the holes of a memory file. Positions are those of the file.
#[derive(Clone, Debug)]
pub(crate) struct Holes {
    unit_bytes: u64,
    units: BTreeMap<u64, Unit>,
}

impl Holes {
    pub(crate) fn new(unit_bytes: u64) -> Self {
        Self { unit_bytes, units: BTreeMap::new() }
    }

    /// Returns the minimum and maximum bytes of all units that are not holes.
    pub(crate) fn room_bytes(&self) -> RangeInclusive<u64> {
        let spare = self.units.values().filter(|unit| **unit == Unit::Spare).count();
        let most = self.units.len();
        (most - spare) as u64 * self.unit_bytes..=most as u64 * self.unit_bytes
    }

    /// Returns the end of the unit that holds the byte before `position`.
    pub(crate) fn end_of_unit(&self, position: u64) -> u64 {
        position.next_multiple_of(self.unit_bytes)
    }

    pub(crate) fn note_written(&mut self, bytes: Range<u64>) {
        self.units.extend(self.units_of(&bytes).map(|unit| (unit, Unit::Data)));
    }

    /// Notes that holes were allocated.
    pub(crate) fn note_room(&mut self, bytes: Range<u64>) {
        for unit in self.units_of(&bytes) {
            let known = self.units.entry(unit).or_insert(Unit::Room);
            if *known == Unit::Spare {
                *known = Unit::Room;
            }
        }
    }

    /// Notes that holes may be allocated now.
    pub(crate) fn note_pinned(&mut self, bytes: Range<u64>) {
        for unit in self.units_of(&bytes) {
            self.units.entry(unit).or_insert(Unit::Spare);
        }
    }

    /// Makes whole units holes; a partly punched unit that is all zeros becomes allocated space.
    pub(crate) fn punch(&mut self, bytes: Range<u64>, is_zero: impl Fn(Range<u64>) -> bool) {
        let is_inside = |units: &Range<u64>| {
            let own = units.start * self.unit_bytes..units.end * self.unit_bytes;
            bytes.start <= own.start && own.end <= bytes.end
        };
        for unit in self.units_of(&bytes) {
            let own = unit * self.unit_bytes..(unit + 1) * self.unit_bytes;
            let is_zero = || self.unit(unit) == Some(Unit::Data) && is_zero(own);
            if is_inside(&(unit..unit + 1)) {
                self.units.remove(&unit);
            } else if is_zero() {
                self.units.insert(unit, Unit::Room);
            }
        }
    }

    /// Returns `true` if the range has a hole; `None` if that is unspecified.
    pub(crate) fn has_hole(&self, bytes: Range<u64>) -> Option<bool> {
        let is = |wanted: Option<Unit>| self.units_of(&bytes).any(|unit| self.unit(unit) == wanted);
        if is(None) { Some(true) } else { (!is(Some(Unit::Spare))).then_some(false) }
    }

    /// Removes everything past the new end.
    pub(crate) fn cut(&mut self, length_bytes: u64, is_zero: impl Fn(Range<u64>) -> bool) {
        self.punch(length_bytes..u64::MAX, is_zero);
    }

    /// Checks that `found` can be the first data from `position` on, before `end`.
    pub(crate) fn check_seek_data(
        &self,
        position: u64,
        found: Option<u64>,
        end: u64,
    ) -> Result<(), String> {
        let stop = self.check_place("seek_data", position, found.unwrap_or(end), end)?;
        let skipped = self.units_of(&(position..stop));
        if let Some(unit) = skipped.clone().find(|unit| self.unit(*unit) == Some(Unit::Data)) {
            return Err(format!("seek_data({position}) passes the data of unit {unit}: {found:?}"));
        }
        let is_hole = |stop: u64| self.unit(stop / self.unit_bytes).is_none();
        if stop < end && is_hole(stop) {
            return Err(format!("seek_data({position}) finds a hole at {stop}"));
        }
        Ok(())
    }

    /// Checks that `found` can be the first hole from `position` on, or `end`.
    pub(crate) fn check_seek_hole(
        &self,
        position: u64,
        found: u64,
        end: u64,
    ) -> Result<(), String> {
        let stop = self.check_place("seek_hole", position, found, end)?;
        let mut skipped = self.units_of(&(position..stop));
        if let Some(unit) = skipped.find(|unit| self.unit(*unit).is_none()) {
            return Err(format!("seek_hole({position}) passes the hole of unit {unit}: {found}"));
        }
        if stop < end && self.unit(stop / self.unit_bytes) == Some(Unit::Data) {
            return Err(format!("seek_hole({position}) finds data at {stop}"));
        }
        Ok(())
    }

    /// Checks the result of a seek, at most `end`: not backwards, and not inside a unit.
    fn check_place(&self, seek: &str, from: u64, found: u64, end: u64) -> Result<u64, String> {
        let stop = found.min(end);
        let is_edge = stop == from || stop == end || stop.is_multiple_of(self.unit_bytes);
        if stop < from || !is_edge {
            return Err(format!("{seek}({from}) answers {found}, where no unit begins"));
        }
        Ok(stop)
    }

    fn unit(&self, unit: u64) -> Option<Unit> {
        self.units.get(&unit).copied()
    }

    fn units_of(&self, bytes: &Range<u64>) -> Range<u64> {
        if bytes.is_empty() {
            return 0..0;
        }
        let known = self.units.last_key_value().map_or(0, |(last, _)| last + 1);
        let end = bytes.end.div_ceil(self.unit_bytes);
        let start = bytes.start / self.unit_bytes;
        // Nothing stands behind those.
        start..if bytes.end == u64::MAX { known.max(start) } else { end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates units of 10 bytes: 1 and 2 are data, 3 is allocated; the file ends at 65.
    fn holes() -> Holes {
        let mut holes = Holes::new(10);
        holes.note_written(12..25);
        holes.note_room(15..31);
        holes
    }

    #[test]
    fn seeks_may_say_either_of_room_and_nothing_else() {
        let holes = holes();
        assert_eq!(holes.room_bytes(), 30..=30);
        for (position, found, good) in [
            (0, Some(10), true),
            (0, Some(9), false),
            (0, Some(12), false),
            (0, Some(20), false),
            (0, None, false),
            (12, Some(12), true),
            (30, Some(30), true),
            (30, None, true),
            (30, Some(40), false),
            (40, None, true),
        ] {
            let answer = holes.check_seek_data(position, found, 65);
            assert_eq!(answer.is_ok(), good, "seek_data({position}) = {found:?}: {answer:?}");
        }
        for (position, found, good) in [
            (0, 0, true),
            (0, 10, false),
            (12, 30, true),
            (12, 40, true),
            (12, 20, false),
            (12, 50, false),
            (12, 31, false),
            (31, 31, true),
            (64, 65, false),
        ] {
            let answer = holes.check_seek_hole(position, found, 65);
            assert_eq!(answer.is_ok(), good, "seek_hole({position}) = {found}: {answer:?}");
        }
    }

    #[test]
    fn a_punch_of_whole_units_makes_holes_and_one_of_parts_room() {
        let mut holes = holes();
        holes.punch(15..40, |_| false);
        assert_eq!(holes.unit(1), Some(Unit::Data));
        assert_eq!((holes.unit(2), holes.unit(3)), (None, None));
        holes.punch(12..20, |unit| unit == (10..20));
        assert_eq!(holes.unit(1), Some(Unit::Room));
        holes.note_written(0..40);
        holes.cut(15, |_| false);
        assert_eq!(holes.room_bytes(), 20..=20);
        holes.note_written(0..80);
        assert_eq!(holes.has_hole(0..80), Some(false));
        assert_eq!(holes.has_hole(0..81), Some(true));
        holes.punch(10..60, |_| true);
        assert_eq!((holes.unit(1), holes.unit(4)), (None, None));
        holes.note_pinned(150..160);
        assert_eq!((holes.has_hole(150..160), holes.room_bytes()), (None, 30..=40));
        holes.note_room(150..151);
        assert_eq!(holes.has_hole(150..160), Some(false));
        holes.punch(100..200, |_| true);
        holes.punch(0..40, |_| true);
        assert_eq!(holes.room_bytes(), 20..=20);
        holes.note_written(0..80);
        holes.cut(15, |_| false);
        assert_eq!(holes.room_bytes(), 20..=20);
        assert_eq!(holes.unit(1), Some(Unit::Data));
    }
}
