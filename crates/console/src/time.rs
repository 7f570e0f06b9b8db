// SPDX-License-Identifier: Apache-2.0
//! Moments and how they are written. The caller reads the clock and knows the time zone.

use std::sync::Arc;

/// Microseconds since 1970-01-01 00:00:00 UTC, leap seconds not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(pub u64);

/// A time zone at a moment: what `strftime` calls `%Z` and `%z`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Zone {
    name: ZoneName,
    offset_s: i32,
}

/// The name is nearly always static; a shared text keeps [`Zone`] cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ZoneName {
    Static(&'static str),
    Shared(Arc<str>),
}

impl Zone {
    /// Coordinated universal time.
    pub const UTC: Self = Self { name: ZoneName::Static("UTC"), offset_s: 0 };

    /// A zone by abbreviation (`CET`) and offset in seconds east of UTC. Offsets of a day or more are cut to it.
    #[must_use]
    pub fn new(name: &str, offset_s: i32) -> Self {
        Self { name: ZoneName::Shared(name.into()), offset_s: offset_s.clamp(-86_399, 86_399) }
    }

    /// Abbreviation.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.name {
            ZoneName::Static(name) => name,
            ZoneName::Shared(name) => name,
        }
    }
}

impl Timestamp {
    /// `2026-11-21 20:54:41 UTC`, as in SHOW CLIENTS.
    #[must_use]
    pub fn seconds_text(self, zone: &Zone) -> String {
        let Civil { year, month, day, hour, minute, second, .. } = self.civil(zone);
        format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} {}", zone.name())
    }

    /// `2026-11-21 20:54:41.123 UTC`, as in the log.
    #[must_use]
    pub fn millis_text(self, zone: &Zone) -> String {
        let Civil { year, month, day, hour, minute, second, micros } = self.civil(zone);
        let millis = micros / 1000;
        format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{millis:03} {}", zone.name())
    }

    /// RFC 3339 with microseconds: `2026-11-21T20:54:41.123456Z`, or with an offset.
    #[must_use]
    pub fn rfc3339_text(self, zone: &Zone) -> String {
        let Civil { year, month, day, hour, minute, second, micros } = self.civil(zone);
        let mut text = format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}");
        if zone.offset_s == 0 {
            text.push('Z');
        } else {
            let sign = if zone.offset_s < 0 { '-' } else { '+' };
            let minutes = zone.offset_s.unsigned_abs() / 60;
            text.push_str(&format!("{sign}{:02}:{:02}", minutes / 60, minutes % 60));
        }
        text
    }

    /// Seconds from `earlier` to `self`, 0 when the clock went back.
    #[must_use]
    pub const fn seconds_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0) / 1_000_000
    }

    fn civil(self, zone: &Zone) -> Civil {
        let micros_of_second = self.0 % 1_000_000;
        // u64 microseconds are at most 1.9e13 seconds, far inside i64.
        let seconds = (self.0 / 1_000_000) as i64 + i64::from(zone.offset_s);
        let (days, second_of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400) as u32);
        let (year, month, day) = date(days);
        Civil {
            year,
            month,
            day,
            hour: second_of_day / 3600,
            minute: second_of_day / 60 % 60,
            second: second_of_day % 60,
            micros: micros_of_second as u32,
        }
    }
}

struct Civil {
    year: i64,
    month: u32,
    day: u32,
    hour: u32,
    minute: u32,
    second: u32,
    micros: u32,
}

/// Proleptic Gregorian date of a day number (0 is 1970-01-01). Years are counted from March, so that the leap
/// day is the last of its year, in eras of 400 years, which all have the same number of days.
const fn date(days: i64) -> (i64, u32, u32) {
    const DAYS_PER_ERA: i64 = 146_097;
    const DAYS_TO_MARCH_0000: i64 = 719_468;
    let shifted = days + DAYS_TO_MARCH_0000;
    let era = shifted.div_euclid(DAYS_PER_ERA);
    let day_of_era = shifted.rem_euclid(DAYS_PER_ERA);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = (day_of_year - (153 * month_from_march + 2) / 5 + 1) as u32;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + if month <= 2 { 1 } else { 0 };
    (year, month as u32, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        let cases = [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_164_800, "2024-02-29 00:00:00 UTC"),
            (1_795_294_481, "2026-11-21 20:54:41 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ];
        for (seconds, text) in cases {
            assert_eq!(Timestamp(seconds * 1_000_000).seconds_text(&Zone::UTC), text);
        }
    }

    #[test]
    fn every_day_follows_the_one_before() {
        let (mut year, mut month, mut day) = date(0);
        for days in 1..200_000 {
            let next = date(days);
            let same_month = next == (year, month, day + 1);
            let same_year = next == (year, month + 1, 1) && day >= 28;
            assert!(
                same_month || same_year || (next == (year + 1, 1, 1) && (month, day) == (12, 31)),
                "{next:?}"
            );
            (year, month, day) = next;
        }
    }

    #[test]
    fn zones_and_fractions() {
        let moment = Timestamp(1_795_294_481_123_456);
        assert_eq!(moment.millis_text(&Zone::UTC), "2026-11-21 20:54:41.123 UTC");
        assert_eq!(moment.rfc3339_text(&Zone::UTC), "2026-11-21T20:54:41.123456Z");
        assert_eq!(moment.rfc3339_text(&Zone::new("IST", 19_800)), "2026-11-22T02:24:41.123456+05:30");
        assert_eq!(moment.rfc3339_text(&Zone::new("NST", -12_600)), "2026-11-21T17:24:41.123456-03:30");
        assert_eq!(Timestamp(0).seconds_text(&Zone::new("EST", -18_000)), "1969-12-31 19:00:00 EST");
        let _ = Timestamp(u64::MAX).millis_text(&Zone::UTC);
    }
}
