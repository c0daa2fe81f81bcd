//! The chart: for each fault that loses anything a histogram of the times until connections succeeded again.

use std::fmt::Write as _;

use super::figures::{BAR, FaultTable, SoakRow};

const LEFT: f64 = 60.0;
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 90.0;
const GAP: f64 = 56.0;
/// What the axis shows at least, in milliseconds.
const LEAST_AXIS: f64 = 2000.0;
/// The time below which nearly all fail-overs are to stay.
const AIM: f64 = 1500.0;

pub(super) fn svg(table: &FaultTable) -> String {
    let shown: Vec<(&String, &SoakRow)> = table.iter().filter(|(_, row)| !row.again_ms.is_empty()).collect();
    let longest = shown.iter().filter_map(|(_, row)| row.quantile(1.0)).fold(LEAST_AXIS, f64::max);
    let axis = (longest / BAR).ceil() * BAR;
    let mut body = String::new();
    let mut y = 60.0;
    for (name, row) in shown {
        histogram(&mut body, y, axis, name, row);
        y += HEIGHT + GAP;
    }
    let width = LEFT + WIDTH + 40.0;
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" font-family="sans-serif" font-size="11">
<rect width="100%" height="100%" fill="#fff"/>
<text x="{LEFT}" y="24" font-size="14">milliseconds from the fault until new connections succeed again (dashed line: 1500)</text>
{body}</svg>
"##
    )
}

fn histogram(body: &mut String, y: f64, axis: f64, name: &str, row: &SoakRow) {
    let bars = row.histogram();
    let highest = bars.iter().copied().max().unwrap_or(1);
    let scale = WIDTH / axis;
    let bottom = y + HEIGHT;
    let figure = |part: f64| row.quantile(part).unwrap_or(0.0);
    let (p50, p99, worst) = (figure(0.5), figure(0.99), figure(1.0));
    let note = format!("{name}: {} times, p50 {p50:.0}, p99 {p99:.0}, worst {worst:.0} ms", row.again_ms.len());
    // Writing to a String cannot fail.
    let _ = writeln!(body, r#"<text x="{LEFT}" y="{}" font-size="12">{note}</text>"#, y - 8.0);
    for (count, place) in bars.iter().zip(0_u32..).filter(|(count, _)| **count > 0) {
        let (count, highest) = (u32::try_from(*count).unwrap_or(u32::MAX), u32::try_from(highest).unwrap_or(u32::MAX));
        let height = HEIGHT * f64::from(count) / f64::from(highest.max(1));
        let (x, width) = (LEFT + f64::from(place) * BAR * scale, BAR * scale - 1.0);
        let top = bottom - height;
        let _ = writeln!(
            body,
            r##"<rect x="{x:.1}" y="{top:.1}" width="{width:.1}" height="{height:.1}" fill="#2f6f9f"/>"##
        );
    }
    let right = LEFT + WIDTH;
    let _ = writeln!(body, r##"<line x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" stroke="#333"/>"##);
    let aim = LEFT + AIM * scale;
    let _ = writeln!(
        body,
        r##"<line x1="{aim:.1}" x2="{aim:.1}" y1="{y}" y2="{bottom}" stroke="#333" stroke-dasharray="3 3"/>"##
    );
    for tick in (0..).map(|number| f64::from(number) * 500.0).take_while(|tick| *tick <= axis) {
        let x = LEFT + tick * scale;
        let below = bottom + 14.0;
        let _ = writeln!(body, r#"<text x="{x:.1}" y="{below}" text-anchor="middle">{tick:.0}</text>"#);
    }
}
