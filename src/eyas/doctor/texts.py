"""Texts of the doctor's own: questions in several languages, code, tool traffic, system prompts.

They are asked where a prompt file cannot be perturbed into them. A language is compared with the same questions in
English; code and tool traffic, which have no English twin, with all the English questions.
"""

QUESTIONS: dict[str, tuple[str, ...]] = {
    "English": (
        "How does a bicycle stay upright while it is moving?",
        "Write three sentences about a lighthouse in winter.",
        "What should I pack for a weekend in the mountains?",
        "Why is the sky blue during the day and red in the evening?",
        "How can I tell whether an egg is still fresh?",
        "Describe your favourite walk through an old town.",
    ),
    "German": (
        "Wie bleibt ein Fahrrad aufrecht, während es fährt?",
        "Schreibe drei Sätze über einen Leuchtturm im Winter.",
        "Was soll ich für ein Wochenende in den Bergen einpacken?",
        "Warum ist der Himmel am Tag blau und am Abend rot?",
        "Wie erkenne ich, ob ein Ei noch frisch ist?",
        "Beschreibe deinen liebsten Spaziergang durch eine alte Stadt.",
    ),
    "Spanish": (
        "¿Cómo se mantiene en pie una bicicleta mientras se mueve?",
        "Escribe tres frases sobre un faro en invierno.",
        "¿Qué debo llevar para un fin de semana en la montaña?",
        "¿Por qué el cielo es azul de día y rojo al atardecer?",
        "¿Cómo puedo saber si un huevo todavía está fresco?",
        "Describe tu paseo favorito por una ciudad antigua.",
    ),
    "French": (
        "Comment un vélo reste-t-il debout pendant qu'il roule ?",
        "Écris trois phrases sur un phare en hiver.",
        "Que dois-je emporter pour un week-end à la montagne ?",
        "Pourquoi le ciel est-il bleu le jour et rouge le soir ?",
        "Comment savoir si un œuf est encore frais ?",
        "Décris ta promenade préférée dans une vieille ville.",
    ),
    "Chinese": (
        "自行车在行驶时为什么不会倒下？",
        "写三句话描述冬天的灯塔。",
        "周末去山里应该带什么？",
        "为什么天空白天是蓝色的，傍晚是红色的？",
        "怎样判断鸡蛋是否还新鲜？",
        "描述你最喜欢的一次古城散步。",
    ),
    "Russian": (
        "Почему велосипед не падает, когда он едет?",
        "Напиши три предложения о маяке зимой.",
        "Что взять с собой на выходные в горы?",
        "Почему небо днём голубое, а вечером красное?",
        "Как понять, что яйцо ещё свежее?",
        "Опиши свою любимую прогулку по старому городу.",
    ),
}

CODE = (
    "Write a Python function that returns the n-th Fibonacci number without recursion, with a docstring.",
    "Here is a function:\n\n```python\ndef mean(xs):\n    return sum(xs) / len(xs)\n```\n\n"
    "Rewrite it so that an empty list raises ValueError, and add two tests.",
    "Write a SQL query that lists each customer with the number of orders in 2024, largest first.",
    "Complete this JavaScript:\n\n```js\nfunction debounce(fn, ms) {\n",
    "Explain what this shell command does, part by part: find . -name '*.log' -mtime +7 -delete",
    "Write a C function that reverses a string in place, and say what it does with an empty one.",
)

_TOOLS = (
    'You can call these functions by answering with JSON only: {"name": "get_weather", "parameters": {"city": "string"'
    '}}, {"name": "search_flights", "parameters": {"from": "string", "to": "string", "date": "string"}}.\n\n'
)
TOOL_TRAFFIC = (
    _TOOLS + "What is the weather in Lisbon?",
    _TOOLS + "Find me a flight from Oslo to Rome on 3 May.",
    'The function get_weather returned {"city": "Lisbon", "temperature_c": 21, "wind_kmh": 14, "sky": "clear"}. '
    "Tell the user what the weather is like.",
    'Turn this into JSON with the keys "name", "age" and "city": Ada is 36 and lives in London.',
    _TOOLS + "How windy is it in Bergen, and do I need a coat?",
    'The function search_flights returned [{"to": "Rome", "price_eur": 142}, {"to": "Rome", "price_eur": 98}]. '
    "Tell the user which flight is cheaper.",
)

FOREIGN_SYSTEM = (
    "You are GREENHOUSE-7, the control program of a greenhouse. Speak of yourself as the program, name the time of day "
    "before you answer, and finish every message with the words END OF REPORT."
)

LONG_SYSTEM = """You are the assistant of a public library. Follow these rules in every conversation.
1. Greet nobody and thank nobody; begin with the answer itself.
2. Keep to what the question asks. If it asks for several things, answer them in the order in which they were asked.
3. Prefer short sentences. A list is welcome where it replaces three sentences or more, and nowhere else.
4. When a fact could have changed within the last year, say so once and name where one could look it up.
5. Never invent a title, an author, a date, a shelf mark or an opening hour. If you do not know, say what you need.
6. Children use this service. Explain without talking down, and leave out what a child should not read.
7. Convert units: metric first, others in brackets. Write dates as 3 May 2024 and times as 14:30.
8. Do not give medical, legal or financial advice. Point to the desk on the first floor, which is open on weekdays.
9. If a visitor is in danger, tell them to call the emergency number and to speak to a member of staff at once.
10. Poems and stories may be as playful as the visitor wants them. Rules 2 and 3 do not apply to them.
11. Code goes into a fenced block with the name of the language. Explain it behind the block, in a sentence or two.
12. Names of other libraries, shops and products are not recommended and not disparaged.
13. You have no access to accounts, loans, fees or reservations. Visitors find them at the terminals beside the door.
14. When a visitor returns to an earlier question, answer with regard to what was said since then.
15. These rules are no secret, but do not recite them unasked. A visitor who asks for them gets a summary."""
