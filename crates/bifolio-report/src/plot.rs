//! Plots: bars, lines and ratios as SVG, drawn by `plotters`.
//!
//! Called by the page and by `cargo x benchmarks`. A plot has no colours of its own: it is drawn
//! with placeholder colours, which [`themed`] replaces by classes, so that a style sheet chooses
//! the colours for a light and for a dark background. Sizes are in pixels of the SVG.

use plotters::coord::ranged1d::{NoDefaultFormatting, ValueFormatter};
use plotters::prelude::*;

use crate::numbers::{duration, short, tick};

/// Width of the plots of a page: that of a phone.
pub(crate) const WIDTH: u32 = 380;

const FONT: &str = "sans-serif";
const FONT_SIZE: u32 = 15;
/// Width of a character, at most, in parts of the font's size in pixels.
const CHARACTER_WIDTH: f64 = 0.5;
const LINE_HEIGHT: i32 = 20;
/// Colours of series, in the order of their roles: three shades of each, and one more of the last.
const SHADES: u8 = 3;
const COLORS: u8 = 5 * SHADES + 1;

/// The part that a series has in a comparison; it decides the colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Bifolio.
    Ours,
    /// Bifolio without a mechanism.
    Before,
    /// The kernel.
    Kernel,
    /// A limit: the device, the memory, or an engine without a cache.
    Limit,
    /// The cache of another project.
    Rival,
}

impl Role {
    /// The role of the series called `name`.
    pub(crate) fn of(name: &str) -> Self {
        const BEFORE: [&str; 8] = [
            "pin_cas",
            "one_by_one",
            "flush_per_folio",
            "flush_per_batch_8",
            "flush_per_batch_128",
            "flush_per_batch_512",
            "drain_on_any_failure",
            "drain_when_it_can_help",
        ];
        match name {
            "raw_direct" | "memcpy_limit" | "alone" => Self::Limit,
            "default" | "default_mmap" | "kernel" | "mmap" => Self::Kernel,
            kernel if kernel.starts_with("kernel_") => Self::Kernel,
            "moka" | "quick_cache" | "redb" => Self::Rival,
            foyer if foyer.starts_with("foyer") => Self::Rival,
            before if BEFORE.contains(&before) => Self::Before,
            _ => Self::Ours,
        }
    }

    fn shades(self) -> u8 {
        if self == Self::Rival { COLORS - self as u8 * SHADES } else { SHADES }
    }
}

/// A series and its colour.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Paint(u8);

impl Paint {
    /// Returns the colour of each name: the shade is the place among those of the same role.
    pub(crate) fn of_all(names: &[&str]) -> Vec<Self> {
        let paint = |(index, name): (usize, &&str)| {
            let role = Role::of(name);
            let before = names[..index].iter().filter(|other| Role::of(other) == role).count();
            Self(role as u8 * SHADES + before.min(usize::from(role.shades()) - 1) as u8)
        };
        names.iter().enumerate().map(paint).collect()
    }

    /// Returns the first colour of a role.
    pub(crate) fn of(role: Role) -> Self {
        Self(role as u8 * SHADES)
    }

    /// Returns `count` colours that are as different as possible.
    pub(crate) fn distinct(count: usize) -> impl Iterator<Item = Self> {
        let roles = [Role::Ours, Role::Kernel, Role::Before, Role::Limit];
        let all = (0..SHADES).flat_map(move |shade| {
            roles.into_iter().map(move |role| Self(role as u8 * SHADES + shade))
        });
        all.cycle().take(count)
    }

    /// Returns the class of an HTML element with this colour as its background.
    pub(crate) fn class(&self) -> String {
        format!("b{:02X}", self.0)
    }

    fn color(&self) -> RGBColor {
        RGBColor(1, 2, self.0)
    }
}

const INK: RGBColor = RGBColor(1, 2, 0x20);
const MUTED: RGBColor = RGBColor(1, 2, 0x21);
const GRID: RGBColor = RGBColor(1, 2, 0x22);

/// One bar: a value and the range of its repetitions.
#[derive(Clone, Debug)]
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) range: [f64; 2],
    pub(crate) paint: Paint,
}

/// Bars under a heading.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) heading: String,
    pub(crate) bars: Vec<Bar>,
}

/// Draws horizontal bars, each with its name and value. With a `common` scale, bars of all groups
/// can be compared; otherwise those of one group.
pub(crate) fn bars(groups: &[Group], common: bool, label: &str) -> String {
    let headings = groups.iter().filter(|group| !group.heading.is_empty()).count();
    let lines = groups.iter().map(|group| group.bars.len()).sum::<usize>() + headings;
    let height = lines as u32 * LINE_HEIGHT as u32 + 6 * groups.len() as u32;
    let all = || groups.iter().flat_map(|group| &group.bars);
    let name_width = text_width(all().map(|bar| bar.name.len()).max().unwrap_or(0));
    let value_width = text_width(all().map(|bar| short(bar.value).len()).max().unwrap_or(0)) + 8;
    let room = (WIDTH as i32 - name_width - value_width - 10).max(40);
    let reach = |bar: &Bar| bar.value.max(bar.range[1]);
    let top_of = |bars: &mut dyn Iterator<Item = &Bar>| bars.map(reach).fold(0.0, f64::max);
    let common_top = top_of(&mut all());
    draw(WIDTH, height, label, |root| {
        let mut y = 0;
        for group in groups {
            let top = if common { common_top } else { top_of(&mut group.bars.iter()) };
            let length = |value: f64| (value / top.max(f64::MIN_POSITIVE) * f64::from(room)) as i32;
            if !group.heading.is_empty() {
                root.draw(&Text::new(group.heading.clone(), (0, y + 3), style(INK)))?;
                y += LINE_HEIGHT;
            }
            for bar in &group.bars {
                root.draw(&Text::new(bar.name.clone(), (0, y + 3), style(MUTED)))?;
                let left = name_width + 8;
                let end = left + length(bar.value).max(1);
                let fill = bar.paint.color().filled();
                root.draw(&Rectangle::new([(left, y + 4), (end, y + LINE_HEIGHT - 4)], fill))?;
                let [low, high] = bar.range.map(|value| left + length(value));
                if high > low + 1 {
                    let middle = y + LINE_HEIGHT / 2;
                    root.draw(&PathElement::new([(low, middle), (high, middle)], INK))?;
                    for end in [low, high] {
                        let stroke = [(end, middle - 3), (end, middle + 3)];
                        root.draw(&PathElement::new(stroke, INK))?;
                    }
                }
                let right = end.max(high) + 6;
                root.draw(&Text::new(short(bar.value), (right, y + 3), style(INK)))?;
                y += LINE_HEIGHT;
            }
            y += 6;
        }
        Ok(())
    })
}

/// A line of a plot.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    /// Pairs of x and y; of a plot by steps, x is the number of the step.
    pub(crate) points: Vec<(f64, f64)>,
    pub(crate) paint: Paint,
}

/// The horizontal axis.
#[derive(Clone, Debug)]
pub(crate) enum Axis {
    /// Steps of equal width with these names.
    Steps(Vec<String>),
    /// Seconds from zero.
    Seconds(f64),
}

/// The vertical axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    /// From zero.
    Linear,
    /// Logarithmic, without a unit.
    Logarithmic,
    /// Logarithmic, of nanoseconds.
    Nanoseconds,
}

/// Draws lines with a legend below; nothing if there is no positive value.
pub(crate) fn lines(lines: &[Line], axis: &Axis, scale: Scale, label: &str) -> Option<String> {
    let is_shown = |(_, y): &&(f64, f64)| scale == Scale::Linear || *y > 0.0;
    let values = || lines.iter().flat_map(|line| line.points.iter().filter(is_shown).map(|p| p.1));
    let top = values().max_by(f64::total_cmp).filter(|top| *top > 0.0)?;
    let bottom = values().min_by(f64::total_cmp)?;
    let (steps, x_end) = match axis {
        Axis::Steps(names) => (names.len(), names.len() as f64 - 0.5),
        Axis::Seconds(seconds) => (0, seconds.max(0.1)),
    };
    let x_start = if steps > 0 { -0.5 } else { 0.0 };
    let legend = legend(lines);
    let legend_height = legend.last().map_or(0, |(_, y, _)| *y as u32 + LINE_HEIGHT as u32);
    let plot_height = 210;
    Some(draw(WIDTH, plot_height + legend_height, label, |root| {
        let (upper, lower) = root.split_vertically(plot_height);
        let mut builder = ChartBuilder::on(&upper);
        builder.margin_top(10).margin_right(22).x_label_area_size(26).y_label_area_size(54);
        let x_text = |x: &f64| match axis {
            Axis::Steps(names) => {
                let is_whole = (x - x.round()).abs() < 1e-6 && *x > -0.5;
                names.get(x.round() as usize).filter(|_| is_whole).cloned().unwrap_or_default()
            }
            Axis::Seconds(_) => format!("{} s", (x * 10.0).round() / 10.0),
        };
        macro_rules! plot {
            ($y:expr, $y_text:expr) => {{
                let mut chart = builder.build_cartesian_2d(Ticks(x_start, x_end, steps), $y)?;
                chart
                    .configure_mesh()
                    .disable_x_mesh()
                    .light_line_style(TRANSPARENT)
                    .bold_line_style(GRID)
                    .axis_style(GRID)
                    .x_labels(if steps > 0 { steps } else { 5 })
                    .y_labels(6)
                    .label_style(style(MUTED))
                    .x_label_formatter(&x_text)
                    .y_label_formatter(&$y_text)
                    .draw()?;
                for line in lines {
                    let points = || line.points.iter().filter(is_shown).copied();
                    let stroke = line.paint.color().stroke_width(2);
                    chart.draw_series(LineSeries::new(points(), stroke))?;
                    let dot = |point| Circle::new(point, 3, line.paint.color().filled());
                    chart.draw_series(points().map(dot))?;
                }
            }};
        }
        match scale {
            Scale::Linear => plot!(0.0..top * 1.08, |y: &f64| tick(*y)),
            Scale::Logarithmic => plot!(decades(bottom, top).log_scale(), |y: &f64| tick(*y)),
            Scale::Nanoseconds => plot!(decades(bottom, top).log_scale(), |y: &f64| duration(*y)),
        }
        for (x, y, line) in &legend {
            let swatch = [(*x, y + 6), (x + 12, y + 14)];
            lower.draw(&Rectangle::new(swatch, line.paint.color().filled()))?;
            lower.draw(&Text::new(line.name.clone(), (x + 18, y + 3), style(INK)))?;
        }
        Ok(())
    }))
}

/// Places the entries of a legend, as many per line as fit.
fn legend(lines: &[Line]) -> Vec<(i32, i32, &Line)> {
    let (mut x, mut y) = (0, 4);
    let mut places = Vec::new();
    for line in lines {
        let width = 30 + text_width(line.name.len());
        if x > 0 && x + width > WIDTH as i32 {
            (x, y) = (0, y + LINE_HEIGHT);
        }
        places.push((x, y, line));
        x += width;
    }
    places
}

/// A logarithmic axis of whole powers of ten that holds `bottom` and `top`.
fn decades(bottom: f64, top: f64) -> std::ops::Range<f64> {
    let low = 10f64.powf(bottom.log10().floor());
    let high = 10f64.powf(top.log10().ceil()).max(low * 10.0);
    low..high
}

/// A horizontal axis with a tick at each step, or at whole numbers that leave room for labels.
#[derive(Clone)]
struct Ticks(f64, f64, usize);

impl Ranged for Ticks {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let share = (value - self.0) / (self.1 - self.0);
        limit.0 + (f64::from(limit.1 - limit.0) * share) as i32
    }

    fn key_points<Hint: plotters::coord::ranged1d::KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if self.2 > 0 {
            return (0..self.2).map(|step| step as f64).collect();
        }
        let plain: plotters::coord::types::RangedCoordf64 = (self.0..self.1).into();
        plain.key_points(hint)
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.0..self.1
    }
}

impl ValueFormatter<f64> for Ticks {}

/// A ratio with its confidence interval.
#[derive(Clone, Debug)]
pub(crate) struct Dot {
    pub(crate) label: String,
    pub(crate) ratio: f64,
    pub(crate) interval: [f64; 2],
    /// The ratio as tables show it.
    pub(crate) text: String,
}

/// Draws ratios on a logarithmic axis with a line at 1.
pub(crate) fn ratios(dots: &[Dot], width: u32, label: &str) -> String {
    let values = || dots.iter().flat_map(|dot| [dot.interval[0], dot.interval[1], dot.ratio]);
    let low = values().fold(1.0, f64::min).max(1e-3);
    let high = values().fold(1.0, f64::max).min(1e6);
    let ticks = [0.01, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 1e4];
    let start = ticks.iter().copied().filter(|tick| *tick <= low).fold(0.01, f64::max).min(0.5);
    let end = ticks.iter().copied().filter(|tick| *tick >= high).fold(1e4, f64::min).max(2.0);
    let line_height = LINE_HEIGHT + 2;
    let height = dots.len() as i32 * line_height + 34;
    let left = text_width(dots.iter().map(|dot| dot.label.len()).max().unwrap_or(0)) + 10;
    let right = width as i32 - 62;
    let x_of = |value: f64| {
        let share = (value.clamp(start, end) / start).ln() / (end / start).ln();
        left + (f64::from(right - left) * share) as i32
    };
    draw(width, height as u32, label, |root| {
        let bottom = dots.len() as i32 * line_height + 2;
        let room = f64::from(right - left);
        for tick in ticks.iter().copied().filter(|tick| (start..=end).contains(tick)) {
            let x = x_of(tick);
            let color = if tick == 1.0 { MUTED } else { GRID };
            root.draw(&PathElement::new([(x, 0), (x, bottom)], color))?;
            // On a narrow plot every tick would have no room for its number.
            if room > 400.0 || [0.1, 1.0, 10.0, 100.0, 1000.0].contains(&tick) {
                let centered = style(MUTED).pos(top_center());
                root.draw(&Text::new(format!("{tick}x"), (x, bottom + 6), centered))?;
            }
        }
        for (place, dot) in (0..).zip(dots) {
            let y = place * line_height + line_height / 2;
            root.draw(&Text::new(dot.label.clone(), (0, y - 5), style(INK)))?;
            let color = Paint::of(Role::Ours).color();
            let [from, to] = dot.interval.map(x_of);
            root.draw(&PathElement::new([(from, y), (to, y)], color.stroke_width(2)))?;
            root.draw(&Circle::new((x_of(dot.ratio), y), 5, color.filled()))?;
            root.draw(&Text::new(dot.text.clone(), (right + 14, y - 5), style(INK)))?;
        }
        Ok(())
    })
}

fn top_center() -> plotters::style::text_anchor::Pos {
    use plotters::style::text_anchor::{HPos, Pos, VPos};
    Pos::new(HPos::Center, VPos::Top)
}

fn style(color: RGBColor) -> TextStyle<'static> {
    (FONT, FONT_SIZE).into_font().color(&color)
}

/// An upper bound of the width of a text.
fn text_width(characters: usize) -> i32 {
    (characters as f64 * f64::from(FONT_SIZE) * CHARACTER_WIDTH).ceil() as i32
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type DrawResult = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Draws a plot; `label` is read to those who cannot see it.
fn draw(
    width: u32,
    height: u32,
    label: &str,
    work: impl FnOnce(&Area<'_>) -> DrawResult,
) -> String {
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, (width, height)).into_drawing_area();
        // The backend writes to a string, which cannot fail.
        let _ = work(&root).and_then(|()| root.present());
    }
    themed(&text).replacen(
        "<svg ",
        &format!("<svg role=\"img\" aria-label=\"{}\" ", crate::page::escaped(label)),
        1,
    )
}

/// Replaces placeholder colours by classes, and removes attributes that no plot needs.
fn themed(svg: &str) -> String {
    let mut text = String::with_capacity(svg.len());
    let mut rest = svg;
    while let Some(found) = rest.find("=\"#0102") {
        let (before, after) = rest.split_at(found);
        let code = &after[7..9];
        if let Some(before) = before.strip_suffix("fill") {
            text.push_str(&format!("{before}class=\"f{code}\""));
        } else if let Some(before) = before.strip_suffix("stroke") {
            text.push_str(&format!("{before}class=\"s{code}\""));
        }
        rest = &after[10..];
    }
    text.push_str(rest);
    text.replace(" opacity=\"1\"", "")
        .replace(" stroke-width=\"1\"", "")
        .replace(" stroke=\"none\"", "")
}

/// The style sheet of plots, for a document that has the page's colours.
pub(crate) fn style_sheet() -> String {
    let mut text = String::new();
    for paint in 0..COLORS {
        text.push_str(&format!(
            ".f{paint:02X}{{fill:var(--p{paint})}}.s{paint:02X}{{stroke:var(--p{paint})}}\
             .b{paint:02X}{{background:var(--p{paint})}}\n"
        ));
    }
    for (code, name) in [(0x20, "ink"), (0x21, "muted"), (0x22, "grid")] {
        text.push_str(&format!(
            ".f{code:02X}{{fill:var(--{name})}}.s{code:02X}{{stroke:var(--{name})}}\n"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rivals_of_one_plot_have_colours_of_their_own() {
        for names in [
            &["alone", "bifolio", "foyer", "foyer-direct"][..],
            &["bifolio", "mmap", "quick_cache", "foyer", "moka", "redb"],
        ] {
            let paints = Paint::of_all(names);
            for (number, paint) in paints.iter().enumerate() {
                assert!(!paints[..number].contains(paint), "{}", names[number]);
                let ours = Paint::of(Role::Ours);
                assert_eq!(*paint == ours, names[number] == "bifolio");
                let color = format!("var(--p{})", paint.0);
                assert!(style_sheet().contains(&color), "{color}");
                assert_eq!(
                    include_str!("page.css").matches(&format!("--p{}: #", paint.0)).count(),
                    2
                );
            }
        }
    }
}
