"""Entries of PTX as Python: a function for each stretch of instructions of which only the first is a target of jumps."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ptx import instructions
from ptx.instructions import DTYPES, FORMS


class PtxError(Exception):
    """An error for PTX that is not allowed, or not known to this interpreter, with the line of the source."""


class Place(NamedTuple):
    """The place of an instruction in the PTX and in its source."""

    text: str
    line: int  # of the PTX
    source: str  # and the line of what it was compiled from

    def __str__(self) -> str:
        return f"{self.source}: {self.text} (line {self.line} of the PTX)"


class Instruction(NamedTuple):
    name: str
    operands: list[str]
    guard: str | None  # of a branch: the predicate, with ! before it
    place: Place


@dataclass
class Block:
    """A stretch of instructions, and how it ends: ``("jump", target)``, ``("branch", target)`` if the function says so,
    ``("barrier", predicate, result, place)`` or ``("end",)``.
    """

    instructions: list[Instruction] = field(default_factory=list)
    end: tuple = ("jump", None)
    run: object = None


REGISTER = re.compile(r"%([a-z]+)(\d+)$")
WORD = re.compile(r"-?\d+$")
FLOAT = re.compile(r"0([fd])([0-9A-Fa-f]+)$")
ADDRESS = re.compile(r"\[(?P<base>[%$\w]+)(?:\+(?P<offset>-?\d+))?\]$")
VARIABLE = re.compile(r"\.(?:param|shared) (?:\.align (\d+) )?\.(\w+) ([\w$]+)(?:\[(\d+)\])?$")
ACCESS = re.compile(r"(ld|st)(?:\.volatile(?=\.shared))?\.(param|global|shared)(?:\.v([24]))?\.([usbf]\d+)$")
SHUFFLE = re.compile(r"shfl\.sync\.(up|down|bfly|idx)\.b32$")
SPECIAL = {"%tid.x": "s.thread", "%ctaid.x": "s.block", "%ntid.x": "s.threads", "%nctaid.x": "s.grid"}


class Layout:
    """Offsets of variables of one state space, one after the other."""

    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        self.size = 0

    def add(self, declaration: str) -> None:
        found = VARIABLE.match(declaration)
        if found is None:
            raise PtxError(f"an unknown declaration: {declaration}")
        align, dtype, name, count = found.groups()
        size = DTYPES[dtype].itemsize
        align = int(align or size)
        start = -(-self.size // align) * align
        self.offsets[name] = start
        self.size = start + size * int(count or 1)


class Module:
    """A file of PTX: its entries by their mangled names, each translated when it is asked for."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.files = dict(re.findall(r'^\s*\.file\s+(\d+) "(?:.*/)?([^"/]+)"', text, re.MULTILINE))
        starts = [i for i, line in enumerate(self.lines) if re.match(r"(\.visible )?\.entry ", line)]
        self.starts = {self.lines[i].split(".entry ")[1].split("(")[0].strip(): i for i in starts}
        self.shared = [line.strip(" ;\t") for line in self.lines if line.startswith(".shared")]
        self.made: dict[str, Entry] = {}

    def entry(self, name: str) -> "Entry":
        if name not in self.made:
            start = self.starts[name]
            end = next(i for i in range(start, len(self.lines)) if self.lines[i] == "}")
            self.made[name] = Entry(name, self, start, end)
        return self.made[name]


class Entry:
    def __init__(self, name: str, module: Module, start: int, end: int) -> None:
        self.name, self.module = name, module
        self.parameters, self.shared = Layout(), Layout()
        body = next(i for i in range(start, end) if module.lines[i] == "{")
        for line in module.lines[start + 1 : body]:
            if line.strip().startswith(".param"):
                self.parameters.add(line.strip(" ,\t"))
        words = {word for line in module.lines[body:end] if ".loc" not in line for word in re.findall(r"[\w$]+", line)}
        for declaration in module.shared:
            if declaration.partition("[")[0].split()[-1] in words:
                self.shared.add(declaration)
        self.max_threads = 0
        for line in module.lines[start:body]:
            if found := re.match(r"\.maxntid (\d+)", line):
                self.max_threads = int(found[1])
        self.dtypes: dict[str, np.dtype] = {}  # of registers, by their names in Python
        self.labels: dict[str, int] = {}
        self.blocks: list[Block] = [Block()]
        for instruction in self._instructions(body + 1, end):
            self._place(instruction)
        self._translate()

    # Reading

    def _instructions(self, first: int, end: int) -> Iterator[Instruction | str]:
        """Yield the instructions and labels of a body; registers of an inner scope get other names."""
        scopes: list[dict[str, str]] = [{}]
        source, counted = "", 0
        for number in range(first, end):
            text = self.module.lines[number].split("//")[0].strip()
            if match := re.match(r"\.loc\s+(\d+) (\d+)", text):
                source = f"{self.module.files.get(match[1], '?')}:{match[2]}" if match[2] != "0" else source
                continue
            while text:
                if text[0] in "{}":
                    counted += text[0] == "{"
                    scopes.append({}) if text[0] == "{" else scopes.pop()
                    text = text[1:].strip()
                elif match := re.match(r"([$\w]+):", text):
                    yield match[1]
                    text = text[match.end() :].strip()
                else:
                    statement, semicolon, text = text.partition(";")
                    place = Place(statement.strip(), number + 1, source)
                    if not semicolon:
                        raise PtxError(f"an unknown line: {place}")
                    text = text.strip()
                    if not self._declares(place.text, scopes, counted):
                        yield self._parsed(place, scopes)

    def _declares(self, text: str, scopes: list, counted: int) -> bool:
        if text.startswith((".pragma", ".shared")):
            if text.startswith(".shared"):
                self.shared.add(text)
            return True
        if not (found := re.match(r"\.reg \.(\w+)\s+%(\w+)(?:<(\d+)>)?$", text)):
            return False
        dtype, name, count = found.groups()
        mark = f"_{counted}" if len(scopes) > 1 else ""
        for plain in [f"{name}{i}" for i in range(int(count))] if count else [name]:
            scopes[-1][plain] = plain + mark
            self.dtypes[plain + mark] = DTYPES[dtype]
        return True

    @staticmethod
    def _parsed(place: Place, scopes: list) -> Instruction:
        def named(found: re.Match) -> str:
            return next((f"%{scope[found[1]]}" for scope in reversed(scopes) if found[1] in scope), found[0])

        text = re.sub(r"%(\w+)(?![\w.])", named, place.text)
        guard, text = re.match(r"(?:@(!?%\w+)\s+)?(.*)", text).groups()
        name, _, rest = text.partition(" ") if "\t" not in text else text.partition("\t")
        operands = [part.strip() for part in re.split(r",(?![^{]*\})|\|", rest) if part.strip()]
        return Instruction(name.strip(), operands, guard, place)

    def _place(self, instruction: Instruction | str) -> None:
        """Add the instruction to the last block, and begin a new block after an instruction that ends one."""
        if isinstance(instruction, str):
            if self.blocks[-1].instructions:
                self.blocks.append(Block())
            self.labels[instruction] = len(self.blocks) - 1
            return
        name, operands, guard, place = instruction
        block = self.blocks[-1]
        block.instructions.append(instruction)
        if name in ("bra", "bra.uni"):
            block.end = ("branch" if guard else "jump", operands[0])
        elif guard:
            raise PtxError(f"only branches have guards: {place}")
        elif name in ("bar.sync", "bar.red.or.pred"):
            if "0" not in operands[:2] or len(operands) != (1 if name == "bar.sync" else 3):
                raise PtxError(f"an unknown barrier: {place}")
            block.end = ("barrier", operands[2] if len(operands) == 3 else None, operands[0], place)
        elif name == "ret":
            block.end = ("end",)
        else:
            return
        self.blocks.append(Block())

    # Writing

    def _translate(self) -> None:
        writers = [Writer(self, block) for block in self.blocks]
        outside = set().union(*(writer.read_before | writer.moved_before for writer in writers))
        space = {name: getattr(instructions, name) for name in instructions.__dict__ if not name.startswith("__")}
        self.registers = {
            name: i for i, name in enumerate(sorted(outside | {w for one in writers for w in one.written}))
        }
        for number, (block, writer) in enumerate(zip(self.blocks, writers, strict=True)):
            kind, *rest = block.end
            if kind in ("jump", "branch") and rest[0] is not None:
                block.end = (kind, self.labels[rest[0]])
            elif kind == "jump":
                block.end = (kind, number + 1)
            elif kind == "barrier":
                names = [name and self.registers.get(name.lstrip("%")) for name in rest[:2]]
                block.end = (kind, *names, rest[2])
            constants = {f"c{i}": value for i, value in enumerate(writer.constants)}
            scope = {**space, **constants, "places": writer.places}
            exec(compile(writer.text(outside), f"<{self.name} {number}>", "exec"), scope)
            block.run = scope["block"]


class Writer:
    """The text of one block's function: ``s`` is the state, ``R`` the registers, ``I`` the lanes, or None for all."""

    def __init__(self, entry: Entry, block: Block) -> None:
        self.entry = entry
        self.lines: list[str] = []
        self.constants: list[np.generic] = []
        self.places: list[Place] = []
        self.read_before: set[str] = set()
        self.moved_before: set[str] = set()  # into other registers: what nothing has written may be
        self.written: dict[str, None] = {}
        self.outcome = "None"
        for instruction in block.instructions:
            try:
                self.write(instruction)
            except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
                raise PtxError(f"an unknown instruction: {instruction.place} ({error!r})") from error

    def text(self, outside: set[str]) -> str:
        number = self.entry.registers
        before = [f"{name} = s.taken(R[{number[name]}], I)" for name in sorted(self.read_before)]
        before += [f"{name} = s.moved(R[{number[name]}], I)" for name in sorted(self.moved_before - self.read_before)]
        after = [f"s.put({number[name]}, I, {name})" for name in self.written if name in outside]
        return "\n  ".join(["def block(s, R, I):", *before, *self.lines, *after, f"return {self.outcome}"]) + "\n"

    # Operands

    def register(self, operand: str) -> str:
        name = operand[1:]
        if operand[0] != "%" or name not in self.entry.dtypes:
            raise ValueError(f"{operand} is no register")
        return name

    def constant(self, value: np.generic) -> str:
        self.constants.append(value)
        return f"c{len(self.constants) - 1}"

    def read(self, operand: str, kind: str, moves: bool = False) -> str:
        """Return an operand as the type that an instruction takes: the lower bits of a register, a constant, an address."""
        dtype = DTYPES[kind]
        if operand in SPECIAL:
            return f"s.taken({SPECIAL[operand]}, I)"
        if match := FLOAT.match(operand):
            bits = np.uint32 if match[1] == "f" else np.uint64
            return self.constant(bits(int(match[2], 16)).view(f"f{bits().itemsize}").astype(dtype))
        if WORD.match(operand):
            bits = np.dtype(f"uint{dtype.itemsize * 8}").type(int(operand) % (1 << dtype.itemsize * 8))
            return self.constant(bits.view(dtype))
        for layout in (self.entry.parameters, self.entry.shared):
            if operand in layout.offsets:
                return self.constant(dtype.type(layout.offsets[operand]))
        name = self.register(operand)
        stored = self.entry.dtypes[name]
        if name not in self.written:
            (self.moved_before if moves and stored == dtype else self.read_before).add(name)
        if stored == dtype:
            return name
        if stored.itemsize == dtype.itemsize and stored.kind != "b" and dtype.kind != "b":
            return f"{name}.view('{dtype.name}')"
        if stored.itemsize > dtype.itemsize and stored.kind == "u":
            return f"{name}.astype('uint{dtype.itemsize * 8}').view('{dtype.name}')"
        raise ValueError(f"{operand} is too narrow")

    def assign(self, operand: str, kind: str, text: str) -> None:
        name = self.register(operand)
        dtype, stored = DTYPES[kind], self.entry.dtypes[name]
        self.written[name] = None
        if stored == dtype:
            self.lines.append(f"{name} = {text}")
        elif stored.itemsize == dtype.itemsize and stored.kind != "b" and dtype.kind != "b":
            self.lines.append(f"{name} = ({text}).view('{stored.name}')")
        elif stored.itemsize > dtype.itemsize and stored.kind == "u" and dtype.kind in "ui":
            self.lines.append(f"{name} = ({text}).astype('{stored.name}')")
        else:
            raise ValueError(f"{operand} has no room")

    def address(self, operand: str) -> str:
        base, offset = ADDRESS.match(operand).group("base", "offset")
        narrow = self.entry.dtypes.get(base[1:]) == DTYPES["u32"]  # as it may be for shared memory
        at = f"{self.read(base, 'u32')}.astype('uint64')" if narrow else self.read(base, "u64")
        return f"({at} + {self.constant(np.int64(int(offset)).view(np.uint64))})" if offset else at

    def at(self, place: Place) -> str:
        self.places.append(place)
        return f"places[{len(self.places) - 1}]"

    # Instructions

    def write(self, instruction: Instruction) -> None:
        name, operands, guard, place = instruction
        if name in ("bra", "bra.uni", "ret", "bar.sync", "bar.red.or.pred"):
            if guard:
                self.outcome = f"{'~' if guard[0] == '!' else ''}{self.read(guard.lstrip('!'), 'pred')}"
            if name == "bar.red.or.pred":
                self.outcome = self.read(operands[2], "pred")
                # The result of the barrier is there after it.
                self.read_before.add(self.register(operands[2])) if operands[2][1:] not in self.written else None
        elif name in FORMS and not any("{" in operand for operand in operands):
            form = FORMS[name]
            result, *sources = operands
            texts = [
                self.read(x, kind, name.startswith("mov.")) for x, kind in zip(sources, form.operands, strict=True)
            ]
            self.assign(result, form.result, form.text.format(*texts))
        elif name in ("mov.b32", "mov.b64"):
            self.write_parts(name, *operands)
        elif match := ACCESS.match(name):
            self.write_access(*match.groups(), operands, place)
        elif match := SHUFFLE.match(name):
            texts = [self.read(operand, "b32") for operand in operands[2:]]
            self.lines.append(f"given = s.shuffle(I, '{match[1]}', {', '.join(texts)}, {self.at(place)})")
            self.assign(operands[0], "b32", "given[0]")
            self.assign(operands[1], "pred", "given[1]")
        elif name == "atom.global.min.s64":
            address, value = self.address(operands[1]), self.read(operands[2], "s64")
            self.assign(operands[0], "s64", f"s.atomic_minimum(I, {address}, {value}, {self.at(place)})")
        else:
            raise KeyError(name)

    def write_parts(self, name: str, result: str, operand: str) -> None:
        """Write a move between a register and the registers that hold its lower and upper half."""
        whole, half = ("b32", "b16") if name == "mov.b32" else ("b64", "b32")
        bits = int(half[1:])
        if operand[0] == "{":
            low, high = (self.read(part.strip(), half) for part in operand[1:-1].split(","))
            wide = DTYPES[whole].name
            self.assign(result, whole, f"({low}.astype('{wide}') | {high}.astype('{wide}') << np.{wide}({bits}))")
            return
        low, high = (part.strip() for part in result[1:-1].split(","))
        self.lines.append(f"halves = {self.read(operand, whole)}")
        self.assign(low, half, f"halves.astype('{DTYPES[half].name}')")
        self.assign(high, half, f"(halves >> np.{DTYPES[whole].name}({bits})).astype('{DTYPES[half].name}')")

    def write_access(
        self, how: str, space: str, count: str | None, kind: str, operands: list[str], place: Place
    ) -> None:
        values, address = operands if how == "ld" else operands[::-1]
        parts = [part.strip() for part in values.strip("{}").split(",")]
        if len(parts) != int(count or 1):
            raise ValueError(f"{len(parts)} operands")
        at = self.address(address)
        if how == "st":
            if space == "param":
                raise ValueError("parameters are only read")
            texts = "".join(f"{self.read(part, kind)}, " for part in parts)
            self.lines.append(f"s.store('{space}', I, {at}, '{DTYPES[kind].name}', ({texts}), {self.at(place)})")
            return
        self.lines.append(f"given = s.load('{space}', I, {at}, '{DTYPES[kind].name}', {len(parts)}, {self.at(place)})")
        for k, part in enumerate(parts):
            self.assign(part, kind, f"given[{k}]")
